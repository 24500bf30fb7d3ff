"""One cycle of a batch: draft, verify, accept, commit (DESIGN.md section 7). Rows whose prompt is not in the cache yet read a chunk of it
in the same target pass, and draw their first token at the prompt's last one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from engine.attention import BACKENDS, find_backend
from engine.budget.auto import AutoBudget
from engine.budget.plan import PLAIN, Budget, FixedBudget, Plan, largest_setting
from engine.drafting import Drafter
from engine.errors import RowError
from engine.kv_cache import KVCache, round_up
from engine.law.draws import KeyedDraws
from engine.law.probabilities import softmax_at
from engine.law.tree import Tree, root_only
from engine.law.verification import RULES, Rule, Verdict, match_target, verify, without_replacement
from engine.native import sampling
from engine.native.build import has_kernels
from engine.packing import Padded, merge, pack, pad_runs
from engine.params import COUPLED_DRAW_METHODS, Cycle, Speculation
from engine.prefill import next_chunks
from engine.row import Row
from engine.row_tensors import RowTensors
from engine.stopping import cut_tokens
from engine.stopwatch import BothWatches, NoWatch, Watch
from engine.target import Target
from engine.visited_laws import VisitedLaws


class Decoder:
    """Target, draft and their caches; advances rows in place.

    Args:
        drafter: None without speculation.
        make_draws: from row keys to the draws of a batch; another implementation than the default can watch what is consumed.
        max_prefill_tokens: of one pass, over all rows.
        watch: is told where the time of each pass goes.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        speculation: Speculation,
        *,
        attention: str,
        tokenizer: PreTrainedTokenizerBase | None,
        make_draws: Callable[[Tensor], KeyedDraws] | None = None,
        max_prefill_tokens: int = 2048,
        watch: Watch | None = None,
    ):
        self._target, self.drafter, self._speculation = target, drafter, speculation
        self._tokenizer = tokenizer
        self.rule = _rule_of(speculation)
        # fp32 is for those who want the same bits on every machine
        has_fast_laws = target.dtype == torch.bfloat16 and has_kernels(target.device)
        self.make_draws = make_draws or (sampling.NativeDraws if has_fast_laws else KeyedDraws)
        self.softmax = sampling.softmax_at if has_fast_laws else softmax_at
        self.max_prefill_tokens = max_prefill_tokens
        self._watch = watch or NoWatch()
        self.budget: Budget = FixedBudget(largest_setting(speculation) if drafter else PLAIN)
        if drafter and speculation.budget == "auto":
            self.budget = AutoBudget(speculation, drafter.level_nodes, target.device)
            self._watch = BothWatches(self._watch, self.budget)
        self.cache = target.new_cache()
        self.attention = find_backend(attention, self.cache)

    @property
    def bytes_per_token(self) -> int:
        """Of both caches."""
        return sum(cache.bytes_per_token for cache in self._caches)

    @property
    def _caches(self) -> list[KVCache]:
        return [self.cache, *(self.drafter.caches if self.drafter else ())]

    def capacity(self, row: Row) -> int:
        """Places that a row takes at most: its tokens, and what a cycle puts behind them."""
        drafted = max(self._speculation.tree_size, self.drafter.room) if self.drafter else 1
        return round_up(row.num_prompt_tokens + row.max_tokens + drafted)

    def reserve(self, num_slots: int, capacity: int, max_places: int | None = None) -> None:
        for cache in self._caches:
            cache.reserve(num_slots, capacity, max_places)

    def move_row(self, row: Row, slot: int) -> None:
        """Bring a row to a free slot."""
        self.cache.copy_slot(row.slot, slot, row.num_cached)
        for cache in self.drafter.caches if self.drafter else ():
            cache.copy_slot(row.slot, slot, row.num_draft_cached)
        row.slot = slot

    @torch.inference_mode()
    def run(self, rows: Sequence[Row]) -> None:
        """Advance each row by one cycle, or by a chunk of its prompt; rows[i] holds slot rows[0].slot + i. Sets finish_reason where a row
        ends."""
        device = self._target.device
        chunks = next_chunks(rows, self.max_prefill_tokens)
        timed = self._watch.start_pass(num_rows=len(rows), reads_prompt=any(chunks))
        tensors = RowTensors(rows, self._target.vocab_size, device, self.make_draws, self.softmax)
        plan = self.budget.plan(rows)
        with timed.phase("draft"):
            tree = self._draft(rows, tensors, plan)

        with timed.phase("verify"):
            runs, long = pad_runs(chunks, device)
            nodes = self._as_padded(tree, rows)
            prefix_B = torch.tensor([row.num_cached for row in rows], device=device)
            packed = pack(merge(nodes, runs), long, prefix_B, rows[0].slot)
            timed.num_tokens = len(packed.token_N)
            attend = BACKENDS[self.attention](self.cache, packed.new)
            hidden_NH, feature_NF = self._target.forward(packed.token_N, packed.position_N, attend)

        with timed.phase("law"):
            # a row that reads its prompt has its root at the chunk's last token, and draws once that is the prompt's last
            reads_B1 = torch.tensor([not row.is_prefilled for row in rows], device=device).unsqueeze(-1)
            index_BR = torch.where(reads_B1, packed.last_B.unsqueeze(-1), packed.index_BQ[:, : tree.token_BR.shape[1]])
            draws = [row.num_cached + len(chunk) >= row.num_prompt_tokens for row, chunk in zip(rows, chunks, strict=True)]
            laws = VisitedLaws(self._target, tensors, tree, hidden_NH, index_BR, keep_logits=any(row.params.logprobs for row in rows))
            draws_B = torch.tensor(draws, device=device)
            verdict = verify(tree, laws, self.rule, tensors.draws, tensors.position_B, draws_B)
            logprobs = laws.logprobs(verdict.token_BL) if laws.keep_logits else None

        with timed.phase("commit"):
            outcomes = _gather_outcomes(tree, verdict, laws.is_finite_B, index_BR, packed.last_B)
            self._commit(rows, plan, chunks, outcomes, logprobs, feature_NF)
        if isinstance(self.budget, AutoBudget):
            self.budget.learn(plan, tree, verdict, draws)

    def _draft(self, rows: Sequence[Row], tensors: RowTensors, plan: Plan) -> Tree:
        if self.drafter is None:
            return root_only(len(rows), self._target.device)
        return self.drafter.draft(rows, tensors, plan)

    def _as_padded(self, tree: Tree, rows: Sequence[Row]) -> Padded:
        token_BR = tree.token_BR.clone()
        token_BR[:, 0] = torch.tensor([row.tokens[-1] for row in rows], device=token_BR.device)
        is_decoding_B1 = torch.tensor([row.is_prefilled for row in rows], device=token_BR.device).unsqueeze(-1)
        return Padded(
            token_BQ=token_BR,
            depth_BQ=tree.depth_BR,
            exists_BQ=tree.exists_BR & is_decoding_B1,
            visible_BQQ=tree.ancestors_BRR(),
        )

    def _commit(
        self,
        rows: Sequence[Row],
        plan: Plan,
        chunks: Sequence[Sequence[int]],
        outcomes: Sequence[_Outcome],
        logprobs: list[list[float]] | None,
        feature_NF: Tensor,
    ) -> None:
        """Append what each row keeps, compact the cache to the accepted path, and leave the new tokens' features to the draft."""
        moves: list[tuple[int, int, int]] = []
        features = _Features()
        for place, (row, chunk, outcome) in enumerate(zip(rows, chunks, outcomes, strict=True)):
            if not outcome.is_finite:
                self._drop_cycle(row, is_plain=outcome.size == 1)
                continue
            was_prefilled = row.is_prefilled
            if was_prefilled:
                new = [outcome.root_index, *outcome.indices[: outcome.num_accepted]]
            else:
                row.num_cached += len(chunk)
                new = range(outcome.last_index - len(chunk) + 1, outcome.last_index + 1)
            if row.is_prefilled:
                cut = cut_tokens(row, outcome.tokens[: outcome.num_accepted + 1], outcome.num_accepted, self._tokenizer)
                row.tokens += cut.kept
                row.finish_reason = cut.finish_reason
                if logprobs is not None:
                    row.logprobs += logprobs[place][: len(cut.kept)]
                if was_prefilled:
                    row.cycles.append(outcome.cycle(cut.accepted, len(cut.kept), len(rows)))
                    row.num_cycles += 1
                    if outcome.size == 1 and (plan.sizes[place] > 1 or row.takes_plain_step):
                        self._clear_drafts(row)
                    row.takes_plain_step = False
                if row.finish_reason is not None:
                    continue
                if row.seen_V is not None:
                    row.seen_V[torch.tensor(cut.kept, device=row.seen_V.device)] = True
                if was_prefilled:
                    path = enumerate(outcome.nodes[: outcome.num_accepted], start=1)
                    moves += [(row.slot, row.num_cached + node, row.num_cached + step) for step, node in path if node != step]
                    row.num_cached += 1 + outcome.num_accepted
            features.add(row, new)
        if moves:
            self.cache.move(*torch.tensor(moves, device=self._target.device).unbind(1))
        if feature_NF.shape[1]:
            features.hand_over(feature_NF)

    def _drop_cycle(self, row: Row, *, is_plain: bool) -> None:
        """After logits that are not finite. A drafted token may have caused it, so the row takes a plain step next; after one it fails."""
        if not is_plain:
            self.cache.clear_slot(row.slot, row.num_cached)
            row.takes_plain_step = True
            return
        dtype = str(self._target.dtype).removeprefix("torch.")
        row.finish_reason = "error"
        row.error = RowError("not_finite", f"after {row.num_output_tokens} tokens the target's logits are not finite in {dtype}")
        for cache in self._caches:
            cache.clear_slot(row.slot)

    def _clear_drafts(self, row: Row) -> None:
        """After a cycle whose draft came to nothing. What the draft's cache holds behind the row's text may not be finite then, and would
        end the drafts of later cycles too, and of the next row in the slot."""
        for cache in self.drafter.caches if self.drafter else ():
            cache.clear_slot(row.slot, row.num_draft_cached if row.finish_reason is None else 0)


def _rule_of(speculation: Speculation) -> Rule:
    if speculation.method in COUPLED_DRAW_METHODS:
        return match_target
    if speculation.method == "static":
        return without_replacement
    return RULES[speculation.verification.order]


class _Outcome(NamedTuple):
    """What became of a row's cycle.

    tokens: emitted ones. nodes, was_sampled, indices: of each accepted token, its node, whether it was drawn, and where it is packed.
    size, depth, num_sampled: of the tree. root_index, last_index: where the root, and a chunk's last token, are packed.
    """

    tokens: list[int]
    nodes: list[int]
    was_sampled: list[int]
    indices: list[int]
    num_accepted: int
    size: int
    depth: int
    num_sampled: int
    root_index: int
    last_index: int
    is_finite: int

    def cycle(self, num_accepted: int, num_emitted: int, batch_size: int) -> Cycle:
        """The statistics, with what was accepted and emitted after cuts."""
        return Cycle(
            drafted=self.size - 1,
            accepted=num_accepted,
            emitted=num_emitted,
            depth=self.depth,
            sampled_nodes=self.num_sampled,
            sampled_accepted=sum(self.was_sampled[:num_accepted]),
            batch_size=batch_size,
        )


def _gather_outcomes(tree: Tree, verdict: Verdict, is_finite_B: Tensor, index_BR: Tensor, last_B: Tensor) -> list[_Outcome]:
    """Everything the host needs, in one transfer."""
    num_levels = verdict.token_BL.shape[1]
    lists = [verdict.token_BL, verdict.node_BL, tree.sampled_BR.gather(1, verdict.node_BL).long(), index_BR.gather(1, verdict.node_BL)]
    depth_B = (tree.depth_BR * tree.exists_BR).amax(-1)
    numbers = [verdict.num_accepted_B, tree.size_B, depth_B, tree.sampled_BR.sum(-1), index_BR[:, 0], last_B, is_finite_B]
    facts = torch.cat([*lists, torch.stack(numbers, 1)], 1).tolist()
    starts = range(0, len(lists) * num_levels, num_levels)
    return [_Outcome(*(fact[start : start + num_levels] for start in starts), *fact[len(lists) * num_levels :]) for fact in facts]


class _Features:
    """Which of the packed tokens' features the draft reads next, row by row."""

    def __init__(self):
        self._rows: list[Row] = []
        self._index: list[int] = []
        self._counts: list[int] = []

    def add(self, row: Row, index: Sequence[int]) -> None:
        if index:
            self._rows.append(row)
            self._index += index
            self._counts.append(len(index))

    def hand_over(self, feature_NF: Tensor) -> None:
        """Copies: the packed features of all tokens of a pass are let go."""
        if self._rows:
            kept = feature_NF[torch.tensor(self._index, device=feature_NF.device)].split(self._counts)
            for row, feature_TF in zip(self._rows, kept, strict=True):
                row.pending_TF = feature_TF if row.pending_TF is None else torch.cat([row.pending_TF, feature_TF])
