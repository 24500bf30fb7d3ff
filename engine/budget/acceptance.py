"""How many drafted tokens trees have had accepted. A cycle tells it of its own setting and of every smaller one: the smaller tree is a part
of the larger, and the walk through it goes the same way as far as it reaches. That is so to the token where candidates are not drawn, and
in law where they are (LAW.md 2.4: whether a sampled child is there changes nothing for its siblings). A tree of fewer levels and as many
nodes is wider than the larger one, so of the last of its nodes nothing is known, and what it would have had accepted is a lower bound."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.budget.plan import Setting
from engine.law.tree import Tree
from engine.law.verification import Verdict

#: cycles of rows after which a measurement weighs 1/e
_MEMORY = 512


def accepted_within(tree: Tree, verdict: Verdict, settings: Sequence[Setting]) -> Tensor:
    """[B, S]: accepted tokens of each row, had its tree been of each setting, at least; for settings no larger than the tree's own."""
    level_L = torch.arange(verdict.node_BL.shape[1], device=verdict.node_BL.device)
    accepted_BL = level_L < verdict.num_accepted_B.unsqueeze(-1)
    rank_BL = tree.rank_BR.gather(1, verdict.node_BL)
    before_BLR = tree.exists_BR.unsqueeze(1) & (tree.rank_BR.unsqueeze(1) < rank_BL.unsqueeze(-1))
    #: with fewer levels a node's rank is lower
    within = {depth: (before_BLR & (tree.depth_BR <= depth).unsqueeze(1)).sum(-1) for depth in {setting.depth for setting in settings}}
    columns = [(accepted_BL & (level_L < depth) & (within[depth] < size)).sum(-1) for size, depth in settings]
    return torch.stack(columns, -1)


class Acceptance:
    """Of each setting, the share of past cycles that had at least 1, 2, ... tokens accepted."""

    def __init__(self, settings: Sequence[Setting]):
        self._reached = {setting: [0.0] * setting.depth for setting in settings}
        self._weight = dict.fromkeys(settings, 0.0)

    def learn(self, setting: Setting, accepted: int) -> None:
        kept = 1 - 1 / _MEMORY
        self._weight[setting] = kept * self._weight[setting] + 1
        self._reached[setting] = [kept * share + (accepted > level) for level, share in enumerate(self._reached[setting])]

    def num_cycles(self, setting: Setting) -> float:
        """Measurements, the old ones counted less."""
        return self._weight[setting]

    def mean(self, setting: Setting) -> float:
        """Accepted tokens of a row's cycle."""
        return sum(self._shares(setting))

    def num_walked(self, setting: Setting, num_rows: int) -> float:
        """Levels that the verification of a batch visits: one more than the most that a row of it has accepted."""
        return 1 + sum(1 - (1 - share) ** num_rows for share in self._shares(setting))

    def _shares(self, setting: Setting) -> list[float]:
        weight = self._weight[setting]
        return [share / weight if weight else 0.0 for share in self._reached[setting]]
