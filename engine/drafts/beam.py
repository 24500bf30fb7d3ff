"""The places that a growing tree takes in a draft's cache: level after level behind each row's own text."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.new_tokens import NewTokens


class BeamRegion:
    """Each node of a level sees the row's text, its ancestors and itself.

    Args:
        table_BP: the rows' pages. prefix_B: places that hold the rows' texts.
    """

    def __init__(self, table_BP: Tensor, prefix_B: Tensor):
        self._table_BP, self._prefix_B = table_BP, prefix_B
        self._visible_BFW = torch.zeros(len(prefix_B), 1, 0, dtype=torch.bool, device=prefix_B.device)
        self._level = 0

    def add_level(self, parent_BF: Tensor) -> tuple[NewTokens, Tensor]:
        """The next level's new tokens and their positions [B, F]. parent_BF: each node's parent in the level before."""
        num_rows, width = parent_BF.shape
        device = parent_BF.device
        offset = self._visible_BFW.shape[2]
        ancestors_BFW = self._visible_BFW.gather(1, parent_BF.unsqueeze(-1).expand(-1, -1, offset))
        self_BFF = torch.eye(width, dtype=torch.bool, device=device).expand(num_rows, -1, -1)
        self._visible_BFW = torch.cat([ancestors_BFW, self_BFF], 2)
        new = NewTokens(
            table_BP=self._table_BP,
            prefix_B=self._prefix_B,
            start_B=torch.arange(num_rows, device=device) * width,
            count_B=torch.full((num_rows,), width, device=device),
            offset=offset,
            visible_BQW=self._visible_BFW,
        )
        # all nodes of a level stand at the same position, one behind the level before
        position_BF = (self._prefix_B + self._level).unsqueeze(-1).expand(-1, width)
        self._level += 1
        return new, position_BF
