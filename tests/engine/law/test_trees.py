"""Growth and pruning against a slow plain reading of LAW.md 1.3 and 2.1, and what follows from the shape of trees."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from enumeration import Arm, TableModel, build_trees, constant_model, random_model, run_cycle
from torch import Tensor

from engine.drafting import COUPLED_NOISE_SCALE, COUPLED_SCALE
from engine.law.candidates import CoupledPolicy, ranked
from engine.law.draws import KeyedDraws, Purpose
from engine.law.growth import Pool
from engine.law.keys import fold
from engine.law.tree import Tree, prune, root_only

NUM_ROWS = 24


@dataclass(frozen=True, kw_only=True)
class Entry:
    tokens: tuple[int, ...]  # draft ids from the root
    slots: tuple[int, ...]
    score: float
    parent_rank: int
    sampled: bool
    q_tilde: dict[int, float]

    def order(self) -> tuple:
        return -self.score, len(self.tokens), self.parent_rank, self.slots[-1]


def softmax(logits: dict[int, float], temperature: float = 1.0) -> dict[int, float]:
    largest = max(logits.values())
    weight = {token: math.exp((logit - largest) / temperature) for token, logit in logits.items()}
    return {token: w / sum(weight.values()) for token, w in weight.items()}


def plain_slots(logits: list[float], arm: Arm, draws: KeyedDraws, slots: tuple[int, ...]) -> list[tuple]:
    """(token, construction value, is sampled, q~) of a node's slots, in slot order."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if arm.method == "topk":
        q = softmax({token: logits[token] for token in order})
        return [(token, q[token], False, {}) for token in order[: arm.top_k]]
    order = order[: arm.draft_top or None]
    q = softmax({token: logits[token] for token in order})
    lead, rest = order[: arm.m], order[arm.m :]
    q_tilde = softmax({token: logits[token] for token in rest}, arm.temperature)
    path = torch.zeros(1, 1, dtype=torch.long)
    for slot in slots:
        path = fold(path, slot)
    weight_11M = torch.tensor([[[0.0] * arm.m + [q_tilde[token] for token in rest]]], dtype=torch.float64)
    rank = int(draws.categorical(weight_11M, torch.ones(1, 1).bool(), Purpose.DRAFT, torch.zeros(1, 1).long(), path))
    sampled = order[rank]
    z = sum(q[token] for token in rest)
    proxy = min(q[lead[-1]], z) if lead else min(q[order[0]] + 1e-6, 1)
    fill = [token for token in rest if token != sampled][: arm.top_k - arm.m - 1]
    return [(t, q[t], False, {}) for t in lead] + [(sampled, proxy, True, q_tilde)] + [(t, q[t], False, {}) for t in fill]


def plain_tree(model: TableModel, arm: Arm, draws: KeyedDraws, text: int, size: int) -> list[Entry]:
    pool: list[Entry] = []
    beam = [Entry(tokens=(), slots=(), score=0.0, parent_rank=0, sampled=False, q_tilde={})]
    for _ in range(arm.depth):
        level = []
        for parent_rank, parent in enumerate(beam):
            node = text
            for token in parent.tokens:
                node = int(model.child(torch.tensor(node), model.target_token_V[token]))
            for slot, (token, value, sampled, q_tilde) in enumerate(
                plain_slots(model.draft_logits(torch.tensor(node)).tolist(), arm, draws, parent.slots)
            ):
                level.append(
                    Entry(
                        tokens=(*parent.tokens, token),
                        slots=(*parent.slots, slot),
                        score=parent.score + math.log(value),
                        parent_rank=parent_rank,
                        sampled=sampled,
                        q_tilde=q_tilde,
                    )
                )
        pool += level
        beam = sorted(level, key=Entry.order)[: arm.width]
    return sorted(pool, key=Entry.order)[: size - 1]


def paths(tree: Tree, row: int) -> list[tuple[int, ...]]:
    """Target tokens from the root to each node of a row."""
    path = [()]
    for node in range(1, int(tree.size_B[row])):
        path.append((*path[int(tree.parent_BR[row, node])], int(tree.token_BR[row, node])))
    return path


GROWN = {
    "topk": Arm(method="topk", depth=3),
    "topk, narrow": Arm(method="topk", depth=4, width=2, top_k=4),
    "m0": Arm(m=0, depth=3),
    "m1": Arm(m=1, depth=3),
    "m1, narrow": Arm(m=1, depth=3, width=2, top_k=4, temperature=0.5),
    "m2": Arm(m=2, depth=3, temperature=1.5),
    "truncated": Arm(m=1, depth=3, draft_top=4, top_k=3),
    "chain": Arm(method="chain", depth=5, top_k=1, width=1),
}


def grow_rows(model: TableModel, arm: Arm, size_B: Tensor) -> tuple[Tree, list[KeyedDraws], Tensor]:
    key_B = torch.arange(len(size_B)) * 15485863
    text_B, zeros_B = torch.arange(len(size_B)), torch.zeros_like(size_B)
    tree = build_trees(model, arm, arm.policy(KeyedDraws(key_B), zeros_B), text_B, zeros_B)
    return tree, [KeyedDraws(key_B[row : row + 1]) for row in range(len(size_B))], text_B


@pytest.mark.parametrize("kind", ("plain", "missing"))
@pytest.mark.parametrize("arm", GROWN.values(), ids=GROWN)
def test_against_plain_reading(arm, kind):
    model = random_model(kind, num_tokens=7, seed=1)
    size_B = 1 + torch.arange(NUM_ROWS) % 14
    tree, row_draws, text_B = grow_rows(model, replace(arm, size=lambda *_: size_B), size_B)  # rows of different sizes in one batch
    target = model.target_token_V.tolist()
    ancestors_BRR = tree.ancestors_BRR()
    for row in range(NUM_ROWS):
        entries = plain_tree(model, arm, row_draws[row], int(text_B[row]), int(size_B[row]))
        expected = {tuple(target[token] for token in entry.tokens): entry for entry in entries}
        path = paths(tree, row)
        assert path[0] == () and set(path[1:]) == set(expected) and len(path) == len(entries) + 1
        assert not tree.exists_BR[row, len(path) :].any()
        for node in range(1, len(path)):
            entry = expected[path[node]]
            assert int(tree.parent_BR[row, node]) < node
            assert int(tree.depth_BR[row, node]) == len(path[node])
            assert int(tree.slot_BR[row, node]) == entry.slots[-1]
            assert bool(tree.sampled_BR[row, node]) == entry.sampled
            assert ancestors_BRR[row, node, : len(path)].tolist() == [path[node][: len(other)] == other for other in path]
            if entry.sampled:
                origin = int(tree.origin_BR[row, node])
                token, q = tree.proposal.token[row, origin].tolist(), tree.proposal.probability[row, origin].tolist()
                claimed = {token: probability for token, probability in zip(token, q, strict=True) if probability > 0}
                assert claimed == pytest.approx({target[token]: probability for token, probability in entry.q_tilde.items()}, abs=1e-12)
        assert ancestors_BRR[row, 0].tolist() == [True] + [False] * (len(ancestors_BRR[row]) - 1)


@pytest.mark.parametrize("kind", ("plain", "ties", "near_empty", "underflow", "holes", "worked"))
@pytest.mark.parametrize("arm", GROWN.values(), ids=GROWN)
def test_shape(arm, kind):
    """Connected, no larger than asked, no token twice among siblings, one sampled child at most, and every fill only beside its sample."""
    model = random_model(kind, num_tokens=6, seed=2)
    size_B = 1 + torch.arange(100) % 16
    tree, _, _ = grow_rows(model, replace(arm, size=lambda *_: size_B), size_B)
    assert (tree.size_B <= size_B).all() and tree.token_BR.shape[1] <= arm.max_size
    node_R = torch.arange(tree.token_BR.shape[1])
    assert torch.equal(tree.exists_BR, node_R < tree.size_B.unsqueeze(1))
    parent_depth_BR = tree.depth_BR.gather(1, tree.parent_BR)
    inner_BR = tree.exists_BR & (node_R > 0)
    assert (tree.depth_BR == parent_depth_BR + 1)[inner_BR].all() and (tree.parent_BR < node_R)[inner_BR].all()
    for row in range(100):
        path = paths(tree, row)
        assert len(set(path)) == len(path)
        for node in range(len(path)):
            children = [child for child in range(1, len(path)) if int(tree.parent_BR[row, child]) == node]
            slots = sorted(tree.slot_BR[row, children].tolist())
            assert slots == list(range(len(slots)))  # lead, sample, fill: none without those before it
            assert int(tree.sampled_BR[row, children].sum()) == (0 if arm.method == "topk" else sum(slot == arm.m for slot in slots))


def test_size_one_and_root_only():
    for arm in (GROWN["m1"], GROWN["topk"]):
        tree, _, _ = grow_rows(random_model("plain", 5), replace(arm, size=1, max_size=1), torch.ones(3, dtype=torch.long))
        bare = root_only(3, torch.device("cpu"))
        for name in ("token_BR", "parent_BR", "depth_BR", "exists_BR", "sampled_BR", "slot_BR"):
            assert torch.equal(getattr(tree, name), getattr(bare, name)), name
        assert bare.ancestors_BRR().tolist() == [[[True]]] * 3


def test_ties_follow_the_order_of_the_pool():
    """All scores equal: level first, then the parent's rank, then slot, whatever the tokens are."""
    model = constant_model([0.5, 0.5], [0.5, 0.5])
    size_B = torch.arange(1, 9)
    tree, _, _ = grow_rows(model, Arm(method="topk", top_k=2, width=2, depth=2, size=lambda *_: size_B), size_B)
    full = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    assert [paths(tree, row) for row in range(8)] == [full[:size] for size in range(1, 9)]


def test_parent_before_child_of_equal_score():
    """A child of probability 1 scores as its parent does; the deeper one waits, and other rows' sizes do not matter."""
    pool = Pool(
        token_BP=torch.tensor([[4, 1, 2, 3]]),
        score_BP=torch.zeros(1, 4),
        sampled_BP=torch.zeros(1, 4).bool(),
        slot_BP=torch.tensor([[0, 1, 0, 0]]),
        parent_BP=torch.tensor([[-1, -1, 1, 2]]),
        origin_BP=torch.zeros(1, 4).long(),
        level_P=torch.tensor([1, 1, 2, 3]),
        depth=3,
        proposal=None,
    )
    for size, expected in enumerate([[()], [(), (4,)], [(), (4,), (1,)], [(), (4,), (1,), (1, 2)], [(), (4,), (1,), (1, 2), (1, 2, 3)]], 1):
        assert paths(prune(pool, torch.tensor([size]), 5, torch.arange(5)), 0) == expected


def test_ranking_breaks_ties_by_id():
    value, token = ranked(torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0]]), 4)
    assert token.tolist() == [[1, 2, 4, 0]] and value.tolist() == [[3, 3, 3, 1]]


@pytest.mark.parametrize("num_tokens", (20, 300, 5000))
def test_ranking_breaks_ties_at_its_end_by_id(num_tokens):
    """More tokens tie than are asked for: the lowest ids are taken."""
    logits = torch.zeros(1, num_tokens)
    logits[0, 10] = 1
    assert ranked(logits, 4)[1].tolist() == [[10, 0, 1, 2]]


@pytest.mark.parametrize("num_tokens", (5, 300))
def test_an_overflow_is_no_law(num_tokens):
    logits = torch.zeros(4, num_tokens)
    logits[0, 3], logits[1, 3], logits[2, 2:] = torch.inf, torch.nan, torch.nan
    value, token = ranked(logits, 4)
    assert value.tolist() == [[-torch.inf] * 4] * 3 + [[0.0] * 4]
    assert bool(((token >= 0) & (token < num_tokens)).all())


# --- temperature to zero ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", (0.0, 1e-3))
def test_low_temperature_trees(temperature):
    """Without truncation and near ties the m = 0 tree is Top-K's; the m = 1 tree is not, for x_2 carries the proxy's score."""
    model = random_model("plain", num_tokens=8, seed=3)
    gap_S = model.draft_SV.sort(-1).values.diff(dim=-1).amin(-1)
    model = replace(model, draft_SV=model.draft_SV[gap_S > 0.02])  # rows without near ties
    size_B = torch.full((len(model.draft_SV),), 10)

    def trees(**arm) -> list[set]:
        tree, _, _ = grow_rows(model, Arm(depth=3, top_k=4, width=4, size=10, temperature=temperature, **arm), size_B)
        return [set(paths(tree, row)) for row in range(len(size_B))]

    top_k, m0, m1 = trees(method="topk"), trees(m=0), trees(m=1)
    # scores that differ by less than 3 * eps / q(x_1) may change places: at most a row or two
    assert sum(a == b for a, b in zip(top_k, m0, strict=True)) >= len(top_k) - 1
    assert sum(a != b for a, b in zip(top_k, m1, strict=True)) > len(top_k) / 2


GREEDY = GROWN | {
    "off": Arm(method="off"),
    "m1, leads first": Arm(m=1, depth=3, rule="deterministic_first"),
    "coupled": Arm(method="coupled", depth=3),
    "static": Arm(method="static", depth=2, paths=((0,), (1,), (2,), (0, 0), (0, 1), (1, 0))),
}


def greedy_text(model: TableModel, text: int, num_tokens: int) -> int:
    for _ in range(num_tokens):
        text = int(model.child(torch.tensor(text), model.target_SV[text % len(model.target_SV)].argmax()))
    return text


@pytest.mark.parametrize("kind", ("plain", "ties", "near_empty", "missing", "holes", "truncated"))
@pytest.mark.parametrize("arm", GREEDY.values(), ids=GREEDY)
def test_greedy_text(arm, kind):
    """T = 0 is plain greedy token by token, also where p(x_s) >= q~(x_s) for a token that is not the argmax (FIELD-CASES B35)."""
    model = random_model(kind, num_tokens=6, seed=4)
    arm = replace(arm, temperature=0.0, size=9)
    text_B = torch.arange(60)
    draws = KeyedDraws(text_B)
    start_B = model.length(text_B)
    for cycle in range(3):
        coupled = CoupledPolicy(
            top_k=3,
            scale=COUPLED_SCALE,
            noise_scale=COUPLED_NOISE_SCALE,
            temperature_B=torch.zeros(60),
            position_B=model.length(text_B),
            target_token_V=model.target_token_V,
            num_target_tokens=6,
            draws=draws,
        )
        text_B = run_cycle(model, arm, draws, text_B, cycle, coupled if arm.method == "coupled" else None)
    num_emitted_B = model.length(text_B) - start_B
    assert (num_emitted_B >= 3).all()
    for row in range(60):
        assert int(text_B[row]) == greedy_text(model, row, int(num_emitted_B[row]))
    if arm.method != "off" and kind == "plain":
        assert (num_emitted_B > 3).any()
