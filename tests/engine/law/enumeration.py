"""Exact enumeration: every outcome of every draw with its probability, through the production grow, prune and verify (LAW.md section 5).

A *world* is a row of the batch with a script of outcomes. Past the script's end it takes the first outcome that can happen and files the
others as branches: new worlds, run later. Each complete sequence of outcomes is so run exactly once, and its weight is its probability.

A *text* is an integer: the empty one is 0, and text t followed by token x is t * V + 1 + x.

Shape suffixes beside those of `engine.law`: S draws made so far, C rows that draw now, O outcomes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.law import candidates, growth, probabilities, static, tree, verification
from engine.law.draws import Draws, KeyedDraws, Purpose

CHUNK = 40_000  # worlds in one batch


class EnumeratedDraws:
    """`Draws` over worlds. A key stands for one uniform: when a key is asked again, the interval of [0, 1) that its outcomes so far have
    left is split further, as by the inverse distribution functions of `KeyedDraws`. Shared draws and reused coins are seen that way."""

    def __init__(self, script_BS: Tensor, num_scripted_B: Tensor):
        num_rows = len(num_scripted_B)
        self.outcome_BS, self.num_scripted_B = script_BS.clone(), num_scripted_B
        self.num_drawn_B = torch.zeros_like(num_scripted_B)
        self.weight_B = torch.ones(num_rows, dtype=torch.float64)
        self.key_BS = torch.zeros_like(script_BS, dtype=torch.long)
        self.interval_BS2 = torch.zeros(*script_BS.shape, 2, dtype=torch.float64)
        self._keyed = KeyedDraws(torch.zeros(num_rows, dtype=torch.long))  # the production keys: a collision there would be seen here
        self._branches: list[tuple[Tensor, Tensor, Tensor]] = []

    def categorical(self, weight: Tensor, active: Tensor, purpose: Tensor | int, *coordinates: Tensor) -> Tensor:
        key = self._keyed.key(active.ndim, purpose, *coordinates).expand(active.shape).flatten(1 if active.ndim > 1 else 0)
        places = [tensor.reshape(len(active), -1, *tensor.shape[active.ndim :]).unbind(1) for tensor in (weight, active, key)]
        return torch.stack([self._draw(*place) for place in zip(*places, strict=True)], 1).view(active.shape)

    def bernoulli(self, probability: Tensor, active: Tensor, purpose: Tensor | int, *coordinates: Tensor) -> Tensor:
        return self.categorical(torch.stack([probability, 1 - probability], -1), active, purpose, *coordinates) == 0

    def token(self, p_BV: Tensor, active_B: Tensor, position_B: Tensor) -> Tensor:
        return self.categorical(p_BV, active_B, Purpose.NOISE, position_B)

    def noise(self, position_B: Tensor, num_tokens: int) -> Tensor:
        raise NotImplementedError("coupled noise is continuous: test_coupled.py")

    def _draw(self, weight_BO: Tensor, active_B: Tensor, key_B: Tensor) -> Tensor:
        row_C = active_B.nonzero().squeeze(1)
        if len(row_C) == 0:
            return torch.zeros_like(key_B)
        drawn_C = self.num_drawn_B[row_C]
        if int(drawn_C.max()) >= self.outcome_BS.shape[1]:
            self._add_columns(8)
        law_CO = weight_BO[row_C].double()
        law_CO = law_CO / law_CO.sum(-1, keepdim=True)
        high_CO = law_CO.cumsum(-1)
        low_CO = torch.cat([torch.zeros_like(high_CO[:, :1]), high_CO[:, :-1]], -1)

        column_S = torch.arange(self.outcome_BS.shape[1])
        seen_CS = (self.key_BS[row_C] == key_B[row_C].unsqueeze(-1)) & (column_S < drawn_C.unsqueeze(-1))
        again_C1 = seen_CS.any(-1, keepdim=True)
        last_C = (seen_CS * (column_S + 1)).argmax(-1)
        left_C1, right_C1 = self.interval_BS2[row_C, last_C].masked_fill(~again_C1, 0).split(1, -1)
        right_C1 = torch.where(again_C1, right_C1, 1)
        low_CO, high_CO = torch.maximum(low_CO, left_C1), torch.minimum(high_CO, right_C1)
        cell_CO = (high_CO - low_CO).clamp(min=0)
        # a new key's chances are the law itself: differences of the distribution function would round
        chance_CO = torch.where(again_C1, cell_CO / cell_CO.sum(-1, keepdim=True), law_CO)

        first_C = (chance_CO > 0).long().argmax(-1)
        scripted_C = drawn_C < self.num_scripted_B[row_C]
        outcome_C = torch.where(scripted_C, self.outcome_BS[row_C, drawn_C], first_C)
        other_CO = (chance_CO > 0) & ~scripted_C.unsqueeze(-1) & (torch.arange(chance_CO.shape[1]) != first_C.unsqueeze(-1))
        branching, other = other_CO.nonzero(as_tuple=True)
        self._branches.append((row_C[branching], drawn_C[branching], other))

        def chosen(x_CO: Tensor) -> Tensor:
            return x_CO.gather(1, outcome_C.unsqueeze(1)).squeeze(1)

        self.outcome_BS[row_C, drawn_C] = outcome_C
        self.key_BS[row_C, drawn_C] = key_B[row_C]
        self.interval_BS2[row_C, drawn_C] = torch.stack([chosen(low_CO), chosen(high_CO)], -1)
        self.weight_B[row_C] *= chosen(chance_CO)
        self.num_drawn_B[row_C] += 1
        return torch.zeros_like(key_B).index_copy_(0, row_C, outcome_C)

    def _add_columns(self, num_columns: int) -> None:
        pad = torch.nn.functional.pad
        self.outcome_BS, self.key_BS = pad(self.outcome_BS, (0, num_columns)), pad(self.key_BS, (0, num_columns))
        self.interval_BS2 = pad(self.interval_BS2, (0, 0, 0, num_columns))

    def branches(self) -> tuple[Tensor, Tensor, Tensor]:
        """(row that branched off, script, its length) of the worlds that are still to be run."""
        row, column, outcome = (torch.cat(part) for part in zip(*self._branches, strict=True))
        script_BS = self.outcome_BS[row]
        script_BS[torch.arange(len(row)), column] = outcome
        return row, script_BS, column + 1


@dataclass(frozen=True, kw_only=True)
class TableModel:
    """Target and draft as tables: the logits after a text are those of row (text mod rows), so laws differ from path to path."""

    target_SV: Tensor
    draft_SV: Tensor
    target_token_V: Tensor  # target id of each draft id
    filters: dict[str, float]  # of the target, beside the temperature

    @property
    def num_tokens(self) -> int:
        return self.target_SV.shape[1]

    def child(self, text: Tensor, token: Tensor) -> Tensor:
        return text * self.num_tokens + 1 + token

    def draft_logits(self, text: Tensor) -> Tensor:
        return self.draft_SV[text % len(self.draft_SV)]

    def law_table(self, temperature: float) -> Tensor:
        num_rows = len(self.target_SV)
        values = {f"{name}_B": torch.full((num_rows,), value) for name, value in self.filters.items()}
        filters = probabilities.Filters(temperature_B=torch.full((num_rows,), temperature, dtype=torch.float64), **values)
        return probabilities.probabilities(self.target_SV, filters)

    def complete(self, mass: Tensor, temperature: float, num_tokens: int) -> Tensor:
        """The law of texts of `num_tokens` tokens when shorter texts, of the given `mass`, go on by sampling from p."""
        p_SV, mass = self.law_table(temperature).double(), mass.clone()
        for length in range(num_tokens):
            text = torch.arange(self.first_text(length), self.first_text(length + 1))
            going_on = mass[text].unsqueeze(1) * p_SV[text % len(p_SV)]
            mass[self.first_text(length + 1) : self.first_text(length + 2)] += going_on.flatten()
        return mass[self.first_text(num_tokens) :]

    def first_text(self, length: int) -> int:
        return sum(self.num_tokens**i for i in range(length))

    def length(self, text: Tensor) -> Tensor:
        boundary = [bound for length in range(1, 60) if (bound := self.first_text(length)) < 2**62]
        return torch.bucketize(text, torch.tensor(boundary), right=True)


Size = Callable[[growth.Pool, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to generate. size: nodes of each tree, or a function of (pool, text_B, cycle_B). paths: the shape of a static tree, in
    place of size, top_k and width."""

    method: str = "rheo"
    m: int = 0
    top_k: int = 3
    depth: int = 1
    width: int = 3
    size: int | Size = 4
    max_size: int = 16
    temperature: float = 1.0
    draft_top: int = 0
    rule: str = "stochastic_first"
    paths: tuple[tuple[int, ...], ...] = ()

    def temperature_B(self, num_rows: int) -> Tensor:
        return torch.full((num_rows,), self.temperature, dtype=torch.float64)

    def policy(self, draws: Draws, cycle_B: Tensor) -> candidates.Policy:
        if self.method == "topk":
            return candidates.TopKPolicy(top_k=self.top_k)
        chain = self.method == "chain"
        return candidates.RheoPolicy(
            top_k=1 if chain else self.top_k,
            m=0 if chain else self.m,
            draft_top=self.draft_top,
            temperature_B=self.temperature_B(len(cycle_B)),
            cycle_B=cycle_B,
            draws=draws,
        )

    def verification_rule(self) -> verification.Rule:
        if self.method == "static":
            return verification.without_replacement
        return verification.match_target if self.method in ("topk", "off", "coupled") else getattr(verification, self.rule)


def expand_from(model: TableModel, text_B: Tensor) -> growth.Expand:
    beam_BF = text_B.unsqueeze(1)

    def expand(token_BF: Tensor, parent_BF: Tensor) -> Tensor:
        nonlocal beam_BF
        beam_BF = model.child(beam_BF.gather(1, parent_BF), model.target_token_V[token_BF])
        return model.draft_logits(beam_BF)

    return expand


def build_trees(model: TableModel, arm: Arm, policy: candidates.Policy, text_B: Tensor, cycle_B: Tensor) -> tree.Tree:
    if arm.method == "off":
        return tree.root_only(len(text_B), text_B.device)
    active_B = torch.ones_like(text_B, dtype=torch.bool)
    expand = expand_from(model, text_B)
    largest = arm.size if isinstance(arm.size, int) else arm.max_size
    widths = growth.beam_widths(largest, arm.depth, arm.width)
    pool = growth.grow(model.draft_logits(text_B), expand, policy, widths=widths, active_B=active_B)
    size_B = torch.full_like(text_B, arm.size) if isinstance(arm.size, int) else arm.size(pool, text_B, cycle_B)
    return tree.prune(pool, size_B, arm.max_size, model.target_token_V)


def build_static_trees(model: TableModel, arm: Arm, draws: Draws, text_B: Tensor, cycle_B: Tensor, temperature_B: Tensor) -> tree.Tree:
    return static.grow_static(
        model.draft_logits(text_B),
        expand_from(model, text_B),
        static.lay_out(arm.paths, text_B.device),
        draft_top=arm.draft_top,
        temperature_B=temperature_B,
        cycle_B=cycle_B,
        draws=draws,
        active_B=torch.ones_like(text_B, dtype=torch.bool),
        target_token_V=model.target_token_V,
    )


def run_cycle(model: TableModel, arm: Arm, draws: Draws, text_B: Tensor, cycle: int, policy: candidates.Policy | None = None) -> Tensor:
    """Each row's text after one cycle of the production code."""
    cycle_B = torch.full_like(text_B, cycle)
    if arm.method == "static":
        trees = build_static_trees(model, arm, draws, text_B, cycle_B, arm.temperature_B(len(text_B)))
    else:
        trees = build_trees(model, arm, policy or arm.policy(draws, cycle_B), text_B, cycle_B)
    text_BR = text_B.unsqueeze(1).repeat(1, trees.token_BR.shape[1])
    for node in range(1, text_BR.shape[1]):
        text_BR[:, node] = model.child(text_BR.gather(1, trees.parent_BR[:, node : node + 1]).squeeze(1), trees.token_BR[:, node])
    p_SV = model.law_table(arm.temperature)

    def law_at(node_B: Tensor, active_B: Tensor) -> Tensor:
        return p_SV[text_BR.gather(1, node_B.unsqueeze(1)).squeeze(1) % len(p_SV)]

    verdict = verification.verify(trees, law_at, arm.verification_rule(), draws, model.length(text_B))
    for level in range(trees.max_depth + 1):
        text_B = torch.where(level <= verdict.num_accepted_B, model.child(text_B, verdict.token_BL[:, level]), text_B)
    return text_B


def enumerate_cycles(model: TableModel, arm: Arm, mass: Tensor, cycles: Sequence[int]) -> Tensor:
    """The law of the text after `cycles`, run with one script from every text that has `mass`; both are vectors over texts. Texts longer
    than the vector holds are cut."""
    result = torch.zeros_like(mass)
    text_B = mass.nonzero().squeeze(1)
    pending = [(mass[text_B], text_B, torch.zeros(len(text_B), 8, dtype=torch.long), torch.zeros_like(text_B))]
    while pending and len(text_B):
        start_weight_B, start_B, script_BS, num_scripted_B = pending.pop()
        if len(start_B) > CHUNK:
            pending.append((start_weight_B[CHUNK:], start_B[CHUNK:], script_BS[CHUNK:], num_scripted_B[CHUNK:]))
        draws = EnumeratedDraws(script_BS[:CHUNK], num_scripted_B[:CHUNK])
        text_B = start_B[:CHUNK]
        for cycle in cycles:
            text_B = run_cycle(model, arm, draws, text_B, cycle)
        while bool((text_B >= len(mass)).any()):
            text_B = torch.where(text_B >= len(mass), (text_B - 1) // model.num_tokens, text_B)
        result.index_add_(0, text_B, start_weight_B[:CHUNK] * draws.weight_B)
        row, script_BS, num_scripted_B = draws.branches()
        if len(row):
            pending.append((start_weight_B[row], start_B[row], script_BS, num_scripted_B))
    return result


def law_of_arm(model: TableModel, arm: Arm, num_tokens: int, *, cycles: int = 2, start_length: int = 0, joint: bool = False) -> Tensor:
    """E[Pr(text)] of every text of `num_tokens` tokens after `cycles` cycles, from every text of `start_length` tokens in turn (each of
    mass 1, all in one batch); a text that is shorter by then goes on with p.

    joint: one script over all cycles, so that a key reused across cycles is seen; else each cycle starts from the texts that the one
    before reached, which needs far fewer worlds.
    """
    mass = starts(model, num_tokens, start_length)
    if joint:
        assert num_tokens >= start_length + cycles * (arm.depth + 1), "a joint run does not stop at num_tokens"
        mass = enumerate_cycles(model, arm, mass, range(cycles))
    else:
        for cycle in range(cycles):
            unfinished = mass.clone()
            unfinished[model.first_text(num_tokens) :] = 0
            mass = mass - unfinished + enumerate_cycles(model, arm, unfinished, [cycle])
    return model.complete(mass, arm.temperature, num_tokens)


def starts(model: TableModel, num_tokens: int, start_length: int) -> Tensor:
    text = torch.arange(model.first_text(num_tokens + 1))
    return ((text >= model.first_text(start_length)) & (text < model.first_text(start_length + 1))).double()


def error_of_arm(model: TableModel, arm: Arm, num_tokens: int, *, start_length: int = 0, **options) -> float:
    """Total variation distance between the arm's law of texts and the target's, summed over the starts."""
    target = model.complete(starts(model, num_tokens, start_length), arm.temperature, num_tokens)
    return 0.5 * float((law_of_arm(model, arm, num_tokens, start_length=start_length, **options) - target).abs().sum())


def acceptance(model: TableModel, arm: Arm) -> float:
    """The chance that one cycle from the empty text accepts at least one token."""
    after = enumerate_cycles(model, arm, starts(model, 2, 0), [0])
    return float(after[model.first_text(2) :].sum())


def constant_model(p: Sequence[float] | Tensor, q: Sequence[float] | Tensor) -> TableModel:
    """The same target and draft laws after every text."""
    p_1V, q_1V = (torch.as_tensor(law, dtype=torch.float64).unsqueeze(0) for law in (p, q))
    return TableModel(target_SV=p_1V.log(), draft_SV=q_1V.log(), target_token_V=torch.arange(q_1V.shape[1]), filters={})


def random_model(kind: str, num_tokens: int = 4, seed: int = 0, num_rows: int = 199) -> TableModel:
    """Target and draft tables of one kind:

    plain: random logits, the draft a perturbed target. ties: logits in {0, 1}. near_empty: a lead of mass 1 - 1e-12 on half of the rows.
    underflow: a lead of mass 1, the rest underflows to 0. holes: a third of the draft's logits -inf. missing: the draft's vocabulary lacks
    a target token and lists the others in another order. truncated: a target with top_k 2, so that p has zeros.
    worked: q = (.5, .3, .2, 0, ..) in some order. same: the draft is the target, so that a rejection would leave no residual.
    overflow: a draft in which half of the rows have one or two logits of +inf, or of NaN, or nothing else.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    target_SV = 1.5 * normal(num_rows, num_tokens)
    draft_SV = target_SV + normal(num_rows, num_tokens)
    target_token_V = torch.arange(num_tokens)
    order_SV = torch.rand(num_rows, num_tokens, generator=generator).argsort(1)
    if kind == "ties":
        target_SV, draft_SV = (torch.randint(2, (num_rows, num_tokens), generator=generator).double() for _ in range(2))
    elif kind in ("near_empty", "underflow"):
        gap = {"near_empty": 27.6, "underflow": 2000}[kind]
        draft_SV = draft_SV + gap * (order_SV == 0) * (torch.arange(num_rows) % 2 == 0).unsqueeze(1)
    elif kind == "holes":
        draft_SV = draft_SV.masked_fill((torch.rand(num_rows, num_tokens, generator=generator) < 1 / 3) & (order_SV > 0), -torch.inf)
    elif kind == "missing":
        target_token_V = torch.tensor([2, 0, *range(3, num_tokens)])
        draft_SV = draft_SV[:, target_token_V]
    elif kind == "overflow":
        broken = (torch.inf, torch.inf, torch.nan, torch.nan, torch.inf, torch.nan)
        num_broken = (1, 2, 1, 2, num_tokens, num_tokens)
        for row in range(num_rows):
            if row % 12 < len(broken):
                draft_SV[row, order_SV[row] < num_broken[row % 12]] = broken[row % 12]
    elif kind == "same":
        draft_SV = target_SV.clone()
    elif kind == "worked":
        q = torch.zeros(num_tokens, dtype=torch.float64)
        q[:3] = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
        draft_SV = q.log()[order_SV]
    else:
        assert kind in ("plain", "truncated"), kind
    filters = {"top_k": 2} if kind == "truncated" else {}
    return TableModel(target_SV=target_SV, draft_SV=draft_SV, target_token_V=target_token_V, filters=filters)
