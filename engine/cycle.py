"""One cycle of a batch: draft, verify, accept, commit (DESIGN.md section 7). Rows that have no tokens in the cache yet are prefilled
in the same target pass, and their first token is drawn at the prompt's last token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.attention import BACKENDS
from engine.drafting import Drafter
from engine.errors import RowError
from engine.kv_cache import KVCache, round_up
from engine.law.draws import KeyedDraws
from engine.law.tree import Tree, root_only
from engine.law.verification import RULES, Rule, Verdict, match_target, verify
from engine.packing import Padded, merge, pack, pad_runs
from engine.params import COUPLED_DRAW_METHODS, Cycle, Speculation
from engine.row import Row
from engine.row_tensors import RowTensors
from engine.stopping import Decodes, cut_tokens
from engine.target import Target


class Decoder:
    """Target, draft and their caches; advances rows in place.

    Args:
        drafter: None without speculation.
        make_draws: from row keys to the draws of a batch; another implementation can watch what is consumed.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        speculation: Speculation,
        *,
        attention: str,
        tokenizer: Decodes | None,
        make_draws: Callable[[Tensor], KeyedDraws] = KeyedDraws,
    ):
        self._target, self.drafter, self._speculation = target, drafter, speculation
        self._tokenizer = tokenizer
        self._backend = BACKENDS[attention]
        self.rule: Rule = match_target if speculation.method in COUPLED_DRAW_METHODS else RULES[speculation.verification.order]
        self.make_draws = make_draws
        self.cache = target.new_cache()

    @property
    def bytes_per_token(self) -> int:
        """Of both caches."""
        return sum(cache.bytes_per_token for cache in self._caches)

    @property
    def _caches(self) -> list[KVCache]:
        return [self.cache, self.drafter.cache] if self.drafter else [self.cache]

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
        if self.drafter:
            self.drafter.cache.copy_slot(row.slot, slot, row.num_paired)
        row.slot = slot

    @torch.inference_mode()
    def run(self, rows: Sequence[Row]) -> None:
        """Advance each row by one cycle, or by its prefill; rows[i] holds slot rows[0].slot + i. Sets finish_reason where a row ends."""
        device = self._target.device
        tensors = RowTensors(rows, self._target.vocab_size, device, self.make_draws)
        tree = self._draft(rows, tensors)

        prompts = [() if row.is_prefilled else row.tokens for row in rows]
        runs, long = pad_runs(prompts, device)
        nodes = self._as_padded(tree, rows)
        prefix_B = torch.tensor([row.num_cached for row in rows], device=device)
        packed = pack(merge(nodes, runs), long, prefix_B, rows[0].slot)
        hidden_NH, feature_NF = self._target.forward(packed.token_N, packed.position_N, self._backend(self.cache, packed.new))

        # a row that is prefilled has its root at the prompt's last token
        is_prefill_B1 = torch.tensor([bool(prompt) for prompt in prompts], device=device).unsqueeze(-1)
        index_BR = torch.where(is_prefill_B1, packed.last_B.unsqueeze(-1), packed.index_BQ[:, : tree.token_BR.shape[1]])
        laws = _VisitedLaws(self._target, tensors, tree, hidden_NH, index_BR, keep_logits=any(row.params.logprobs for row in rows))
        verdict = verify(tree, laws, self.rule, tensors.draws, tensors.position_B)
        logprobs = laws.logprobs(verdict.token_BL) if laws.keep_logits else None
        self._commit(rows, tree, verdict, laws.is_finite_B, logprobs, feature_NF, index_BR, packed.last_B)

    def _draft(self, rows: Sequence[Row], tensors: RowTensors) -> Tree:
        if self.drafter is None or all(row.pending_TF is None for row in rows):
            return root_only(len(rows), self._target.device)
        size_B = torch.full((len(rows),), self._speculation.tree_size, device=self._target.device)
        return self.drafter.draft(rows, tensors, size_B)

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
        tree: Tree,
        verdict: Verdict,
        is_finite_B: Tensor,
        logprobs: list[list[float]] | None,
        feature_NF: Tensor,
        index_BR: Tensor,
        last_B: Tensor,
    ) -> None:
        """Append what each row keeps, compact the cache to the accepted path, and leave the path's features to the draft."""
        num_levels = verdict.token_BL.shape[1]
        # everything the host needs, in one transfer
        facts = torch.cat(
            [
                verdict.token_BL,
                verdict.node_BL,
                tree.sampled_BR.gather(1, verdict.node_BL).long(),
                index_BR.gather(1, verdict.node_BL),
                torch.stack(
                    [
                        verdict.num_accepted_B,
                        tree.size_B,
                        (tree.depth_BR * tree.exists_BR).amax(-1),
                        tree.sampled_BR.sum(-1),
                        index_BR[:, 0],
                        last_B,
                        is_finite_B,
                    ],
                    1,
                ),
            ],
            1,
        ).tolist()
        moves: list[tuple[int, int, int]] = []
        feature_rows: list[Row] = []
        feature_index: list[int] = []
        feature_counts: list[int] = []
        for place, (row, fact) in enumerate(zip(rows, facts, strict=True)):
            tokens, nodes, was_sampled, indices = (fact[start * num_levels : (start + 1) * num_levels] for start in range(4))
            num_accepted, size, depth, num_sampled, root_index, last_index, is_finite = fact[4 * num_levels :]
            if not is_finite:
                self._drop_cycle(row, is_plain=size == 1)
                continue
            cut = cut_tokens(row, tokens[: num_accepted + 1], num_accepted, self._tokenizer)
            was_prefilled = row.is_prefilled
            if was_prefilled:
                row.cycles.append(
                    Cycle(
                        drafted=size - 1,
                        accepted=cut.accepted,
                        emitted=len(cut.kept),
                        depth=depth,
                        sampled_nodes=num_sampled,
                        sampled_accepted=sum(was_sampled[: cut.accepted]),
                        batch_size=len(rows),
                    )
                )
                row.num_cycles += 1
            row.tokens += cut.kept
            if logprobs is not None:
                row.logprobs += logprobs[place][: len(cut.kept)]
            row.finish_reason = cut.finish_reason
            if row.finish_reason is not None:
                continue
            if row.seen_V is not None:
                row.seen_V[torch.tensor(cut.kept, device=row.seen_V.device)] = True
            if was_prefilled:
                for step in range(num_accepted):
                    if nodes[step] != step + 1:
                        moves.append((row.slot, row.num_cached + nodes[step], row.num_cached + step + 1))
                row.num_cached += 1 + num_accepted
                new_features = [root_index, *indices[:num_accepted]]
            else:
                row.num_cached = row.num_prompt_tokens
                new_features = range(last_index - row.num_prompt_tokens + 1, last_index + 1)
            if self.drafter is not None:
                feature_rows.append(row)
                feature_index += new_features
                feature_counts.append(len(new_features))
        if moves:
            self.cache.move(*torch.tensor(moves, device=self._target.device).unbind(1))
        if feature_rows:
            kept = feature_NF[torch.tensor(feature_index, device=feature_NF.device)].split(feature_counts)
            for row, feature_TF in zip(feature_rows, kept, strict=True):
                row.pending_TF = feature_TF

    def _drop_cycle(self, row: Row, *, is_plain: bool) -> None:
        """After logits that are not finite. A drafted token may have caused it, so the row takes a plain step next; after one it fails."""
        if not is_plain:
            self.cache.clear_slot(row.slot, row.num_cached)
            self.drafter.cache.clear_slot(row.slot, row.num_paired)
            return
        dtype = str(self._target.dtype).removeprefix("torch.")
        row.finish_reason = "error"
        row.error = RowError("not_finite", f"after {row.num_output_tokens} tokens the target's logits are not finite in {dtype}")
        for cache in self._caches:
            cache.clear_slot(row.slot)


class _VisitedLaws:
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
        logits_AV = self._target.logits(self._hidden_NH[index_B[active_A]])
        # rows whose walk has ended get a law that nobody reads
        logits_BV = logits_AV.new_zeros(len(index_B), logits_AV.shape[-1]).index_copy_(0, active_A, logits_AV)
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
