"""Keys and values of the running rows, in pages of `PAGE` tokens; a row's pages may lie anywhere, and never move.

A row's pages hold a committed prefix, then whatever the running forward pass put behind it. What lies behind the prefix is never attended,
because every mask is made from the prefix's length; but a mask hides numbers, and 0 * NaN is NaN: so a page is cleared when a row takes
it, and a row's own places behind its text where they are not finite.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.pages import PAGE, split_address


class KVCache:
    """Keys and values [layers, pages, kv_heads, PAGE, head_dim]. Memory that no row has used yet is asked for, but not touched.

    A token's place in it is its address: its page * PAGE + its offset in the page.
    """

    def __init__(self, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device):
        self._shape = (num_layers, num_kv_heads, head_dim)
        empty = torch.empty(num_layers, 0, num_kv_heads, PAGE, head_dim, dtype=dtype, device=device)
        self.key, self.value = empty, empty.clone()

    @property
    def bytes_per_token(self) -> int:
        num_layers, num_kv_heads, head_dim = self._shape
        return 2 * num_layers * num_kv_heads * head_dim * self.key.element_size()

    def reserve(self, num_pages: int) -> None:
        """Make the pages 0 .. num_pages - 1; what was stored is lost. Raises RuntimeError where there is no memory."""
        num_layers, num_kv_heads, head_dim = self._shape
        shape = (num_layers, num_pages, num_kv_heads, PAGE, head_dim)
        self.key, self.value = self.key.new_empty(shape), self.value.new_empty(shape)

    def write(self, layer: int, address_N: Tensor, key_NKD: Tensor, value_NKD: Tensor) -> None:
        page_N, offset_N = split_address(address_N)
        self.key[layer][page_N, :, offset_N] = key_NKD
        self.value[layer][page_N, :, offset_N] = value_NKD

    def gather(self, layer: int, table_BP: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the rows' first tokens, copied together: two of [B, K, num_tokens, D]."""
        table_BP = table_BP[:, : -(-num_tokens // PAGE)]
        pages = (stored[layer][table_BP].transpose(1, 2).flatten(2, 3) for stored in (self.key, self.value))
        key, value = (page[:, :, :num_tokens] for page in pages)
        return key, value

    def move(self, source_T: Tensor, target_T: Tensor) -> None:
        """Tokens from addresses `source_T` to `target_T`, in all layers; all is read before anything is written."""
        (source_page_T, source_offset_T), (page_T, offset_T) = split_address(source_T), split_address(target_T)
        for stored in (self.key, self.value):
            stored[:, page_T, :, offset_T] = stored[:, source_page_T, :, source_offset_T]

    def clear(self, pages: Sequence[int], start: int = 0) -> None:
        """Zero the places from `start` on of a row with these pages."""
        first, offset = split_address(start)
        for stored in (self.key, self.value):
            if offset:
                stored[:, pages[first], :, offset:] = 0
            for page in pages[first + bool(offset) :]:
                stored[:, page] = 0
