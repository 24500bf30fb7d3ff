"""Drafting: a draft's laws grown into trees, level by level, by the method's policy (DESIGN.md section 7, steps 1 to 3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.budget.plan import Plan, Setting, largest_setting
from engine.drafts.model import DraftModel, Start
from engine.kv_cache import KVCache
from engine.law.candidates import CoupledPolicy, Policy, RheoPolicy, TopKPolicy
from engine.law.growth import beam_widths, grow
from engine.law.static import Level, grow_static, lay_out
from engine.law.tree import Tree, among_plain, prune, root_only
from engine.params import Speculation
from engine.row import Row
from engine.row_tensors import DraftTensors, RowTensors

#: of the coupled method's construction values (LAW.md section 7, Tree scores): what makes the target's own draws likeliest under them, by
#: `python -m jobs.acceptance.coupled_scores` with the draft that ships
COUPLED_SCALE, COUPLED_NOISE_SCALE = 1.1, 0.9

#: tokens whose features a row that does not draft keeps for the draft; the draft would read them one day in any case
_MAX_PENDING = 256


class Drafter:
    """Trees from a draft.

    Args:
        speculation: tree_size and depth resolved.
        num_target_tokens: the target's vocabulary.
        topology: of `static` trees, the nodes as paths of child ranks.
    """

    def __init__(
        self,
        model: DraftModel,
        speculation: Speculation,
        *,
        num_target_tokens: int,
        device: torch.device,
        topology: Sequence[tuple[int, ...]] = (),
    ):
        self._model = model
        self._speculation = speculation
        self._num_target_tokens = num_target_tokens
        self._topology = topology
        self._levels: dict[int, list[Level]] = {}  # by size
        self._width = 1 if speculation.method == "chain" else speculation.top_k
        self._largest = largest_setting(speculation)
        self._device = device

    @property
    def caches(self) -> Sequence[KVCache]:
        return self._model.caches

    @property
    def room(self) -> int:
        """Places behind a row's text that growth writes to, at most."""
        return sum(self.level_nodes(self._largest)[1:])

    def level_nodes(self, setting: Setting) -> list[int]:
        """Nodes of a row whose children each draft forward finds, the root first."""
        if self._topology:
            return [1, *(len(level.inner) for level in self._static_levels(setting.size)[:-1])]
        return [1, *beam_widths(setting.size, setting.depth, self._width)]

    def draft(self, rows: Sequence[Row], tensors: RowTensors, plan: Plan) -> Tree:
        """Trees of the plan's sizes at most; a row whose size is 1 gets a root alone.

        The rows' slots are consecutive. Of the rows that draft, and of those between them, the draft reads the text that it has not seen;
        of the others once their features are many.
        """
        reading = [index for index, size in enumerate(plan.sizes) if size > 1 or rows[index].num_pending > _MAX_PENDING]
        if not reading:
            return root_only(len(rows), self._device)
        first, end = reading[0], reading[-1] + 1
        start = self._model.begin(rows[first:end])
        if start is None or max(plan.sizes) == 1:
            return root_only(len(rows), self._device)
        tree = self._grow(start, tensors.narrow(first, end), plan.setting, plan.sizes[first:end])
        return among_plain(tree, first, len(rows) - end)

    def _grow(self, start: Start, tensors: DraftTensors, setting: Setting, sizes: list[int]) -> Tree:
        size_B = torch.tensor(sizes, device=self._device)
        drafts_B = size_B > 1
        if self._topology:
            return grow_static(
                start.logits_BU,
                start.expand,
                self._static_levels(setting.size),
                draft_top=self._speculation.draft_top,
                temperature_B=tensors.temperature_B,
                cycle_B=tensors.cycle_B,
                draws=tensors.draws,
                active_B=drafts_B,
                target_token_V=start.target_token_U,
            )
        widths = beam_widths(setting.size, setting.depth, self._width)
        pool = grow(start.logits_BU, start.expand, self._policy(tensors, start.target_token_U), widths=widths, active_B=drafts_B)
        return prune(pool, size_B, setting.size, start.target_token_U)

    def _static_levels(self, size: int) -> list[Level]:
        if size not in self._levels:
            self._levels[size] = lay_out(self._topology[: size - 1], self._device)
        return self._levels[size]

    def _policy(self, tensors: DraftTensors, target_token_U: Tensor) -> Policy:
        speculation = self._speculation
        if speculation.method == "topk":
            return TopKPolicy(top_k=speculation.top_k)
        if speculation.method == "coupled":
            return CoupledPolicy(
                top_k=speculation.top_k,
                scale=COUPLED_SCALE,
                noise_scale=COUPLED_NOISE_SCALE,
                temperature_B=tensors.temperature_B,
                position_B=tensors.position_B,
                target_token_V=target_token_U,
                num_target_tokens=self._num_target_tokens,
                draws=tensors.draws,
            )
        return RheoPolicy(
            top_k=self._width,
            m=0 if speculation.method == "chain" else speculation.m,
            draft_top=speculation.draft_top,
            temperature_B=tensors.temperature_B,
            cycle_B=tensors.cycle_B,
            draws=tensors.draws,
        )
