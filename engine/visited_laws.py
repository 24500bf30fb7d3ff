"""The target's law at the nodes that verification visits."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.law.tree import Tree
from engine.row_tensors import RowTensors
from engine.target import Target


class VisitedLaws:
    """The target's law at the nodes that verification visits: the output head runs there and nowhere else."""

    def __init__(self, target: Target, tensors: RowTensors, tree: Tree, hidden_NH: Tensor, index_BR: Tensor, *, keep_logits: bool):
        self._target, self._tensors, self._tree = target, tensors, tree
        self._hidden_NH, self._index_BR = hidden_NH, index_BR
        self.keep_logits = keep_logits
        self.is_finite_B = torch.ones(len(index_BR), dtype=torch.bool, device=index_BR.device)
        self._logits: list[Tensor] = []
        self._level = 0
        self._path_BV: Tensor | None = None

    def __call__(self, node_B: Tensor, active_B: Tensor) -> Tensor:
        index_B = self._index_BR.gather(1, node_B.unsqueeze(-1)).squeeze(-1)
        active_A = active_B.nonzero().squeeze(-1)
        logits_BV = self._target.logits(self._hidden_NH[index_B[active_A]])
        if len(active_A) < len(index_B):  # rows whose walk has ended get a law that nobody reads
            logits_BV = logits_BV.new_zeros(len(index_B), logits_BV.shape[-1]).index_copy_(0, active_A, logits_BV)
        self.is_finite_B = self.is_finite_B & (logits_BV.amax(-1).isfinite() | ~active_B)
        if self.keep_logits:
            self._logits.append(logits_BV)
        if self._tensors.reads_path and self._level:
            self._extend_path(node_B, logits_BV.shape[-1])
        position_B = self._tensors.position_B + self._level
        self._level += 1
        return self._tensors.law(logits_BV, position_B, self._path_BV)

    def _extend_path(self, node_B: Tensor, vocab_size: int) -> None:
        token_B1 = self._tree.token_BR.gather(1, node_B.unsqueeze(-1)).clamp(min=0)
        on_path_B1 = (node_B > 0).unsqueeze(-1)
        if self._path_BV is None:
            self._path_BV = torch.zeros(len(node_B), vocab_size, dtype=torch.bool, device=node_B.device)
        self._path_BV = self._path_BV.scatter(1, token_B1, on_path_B1 | self._path_BV.gather(1, token_B1))

    def logprobs(self, token_BL: Tensor) -> list[list[float]]:
        """log p of each emitted token under the raw model at T = 1."""
        columns = [
            logits_BV.log_softmax(-1).gather(1, token_B.clamp(min=0).unsqueeze(-1)).squeeze(-1)
            for logits_BV, token_B in zip(self._logits, token_BL.unbind(1), strict=False)
        ]
        return torch.stack(columns, 1).tolist()
