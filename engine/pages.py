"""Pages of the caches: which are free, and where a row's tokens lie in them. A page has the same number in the target's cache and in the
draft's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

#: tokens of a page: as many as the kernels look at together
PAGE = 64

Address = TypeVar("Address", int, Tensor)


def count_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE)


def split_address(address: Address) -> tuple[Address, Address]:
    """The page, and the offset in it; of a place in a row, the number of the row's page."""
    return address // PAGE, address % PAGE


def make_table(pages: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """[B, P] from each row's pages, one at least. The padding is the row's own last page: it is never seen, and another row's page might
    hold what is not finite."""
    width = max(map(len, pages))
    return torch.tensor([[*row, *[row[-1]] * (width - len(row))] for row in pages], device=device)


def find_addresses(table_BP: Tensor, row_N: Tensor, place_N: Tensor) -> Tensor:
    """[N]: where the place `place_N[n]` of row `row_N[n]` lies."""
    page_N, offset_N = split_address(place_N)
    return table_BP[row_N, page_N] * PAGE + offset_N


class PagePool:
    """The pages that no row holds; the page that was given back last is taken first, so that little memory is touched."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._free = list(range(num_pages))[::-1]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, num_pages: int) -> list[int]:
        assert num_pages <= len(self._free), "rows are admitted by the pages that they can need"
        return [self._free.pop() for _ in range(num_pages)]

    def give_back(self, pages: Sequence[int]) -> None:
        self._free += reversed(pages)
