"""What a forward pass adds to the running rows: the one argument that every attention backend is made from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class NewTokens:
    """What a forward pass adds to the B rows. table_BP: the pages of each (`engine.pages.make_table`).

    Row b has count_B[b] new tokens, packed from start_B[b] on, stored at places prefix_B[b] + offset .. of its pages. Token j of it sees
    the prefix, and key prefix_B[b] + w where visible_BQW[b, j, w].
    prompts: rows whose new tokens are a long causal run, kept out of the padded part: (row, length); their count_B is 0 and they are packed
    behind all others, in order.
    """

    table_BP: Tensor
    prefix_B: Tensor
    start_B: Tensor
    count_B: Tensor
    offset: int
    visible_BQW: Tensor
    prompts: tuple[tuple[int, int], ...] = ()
