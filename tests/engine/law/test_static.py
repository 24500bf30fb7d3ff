"""Static trees: E[Pr(text)] = p(text) by exact enumeration (LAW.md 3.1 and 5), their shape, and how much they accept."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from enumeration import (
    Arm,
    TableModel,
    acceptance,
    build_static_trees,
    constant_model,
    enumerate_cycles,
    error_of_arm,
    random_model,
    starts,
)
from torch import Tensor

from engine.law import verification
from engine.law.candidates import ranked
from engine.law.draws import KeyedDraws
from engine.law.static import grow_static, lay_out
from engine.law.tree import Tree, root_only

KINDS = ("plain", "ties", "near_empty", "underflow", "holes", "missing", "truncated", "worked", "same", "overflow")
TEMPERATURES = (0.3, 1.0, 1.5, 0.0)


def static_arm(*paths: tuple[int, ...], **options) -> Arm:
    return Arm(method="static", paths=paths, depth=max(map(len, paths)), **options)


SHAPES = {
    "chain": static_arm((0,), (0, 0), (0, 0, 0)),
    "wide": static_arm((0,), (1,), (2,), (3,)),
    "bushy": static_arm((0,), (1,), (0, 0), (1, 0), (0, 1), (1, 1)),
    "deep": static_arm((0,), (0, 0), (1,), (0, 0, 0), (0, 0, 1)),
    "late": static_arm((0,), (1,), (2,), (2, 0), (2, 0, 0)),  # only a later child has children
}
by_shape = pytest.mark.parametrize("arm", SHAPES.values(), ids=SHAPES)


def check(model: TableModel, arm: Arm, num_tokens: int, **options) -> None:
    error = error_of_arm(model, arm, num_tokens, **options)
    print(f"error {error:.1e}")
    assert error < 1e-12


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("kind", KINDS)
@by_shape
def test_every_shape(arm, kind, temperature):
    """More children than tokens (wide), than tokens that the draft has (holes, worked, underflow), and than tokens that p has."""
    check(random_model(kind, num_tokens=4 if kind == "missing" else 3), replace(arm, temperature=temperature), 3)


@pytest.mark.parametrize("kind", KINDS)
def test_four_tokens(kind):
    check(random_model(kind, num_tokens=5 if kind == "missing" else 4, seed=1), SHAPES["wide"], 3, start_length=1)
    check(random_model(kind, num_tokens=4, seed=1), static_arm((0,), (1,), (2,), (0, 0), (0, 1), temperature=0.7), 3)


@pytest.mark.parametrize("draft_top", (1, 2, 3))
@pytest.mark.parametrize("kind", ("plain", "ties", "missing"))
def test_truncated_draft(kind, draft_top):
    """The draft keeps fewer tokens than a node has children."""
    model = random_model(kind, num_tokens=5, seed=2)
    check(model, replace(SHAPES["wide"], draft_top=draft_top, temperature=0.7), 2, start_length=1)
    check(model, replace(SHAPES["bushy"], draft_top=draft_top), 2)


JOINT = {"wide": (static_arm((0,), (1,)), 4), "chain": (static_arm((0,), (0, 0)), 3), "bent": (static_arm((0,), (1,), (0, 0)), 3)}


@pytest.mark.parametrize("kind", ("plain", "ties", "near_empty"))
@pytest.mark.parametrize("arm, num_tokens", JOINT.values(), ids=JOINT)
def test_cycles_share_no_randomness(arm, num_tokens, kind):
    check(random_model(kind, num_tokens=num_tokens, seed=3), arm, 2 * (arm.depth + 1), joint=True)


@pytest.mark.parametrize("kind", ("plain", "near_empty", "underflow", "same"))
@by_shape
def test_single_precision(arm, kind):
    model = random_model(kind, num_tokens=3, seed=4)
    model = replace(model, target_SV=model.target_SV.float(), draft_SV=model.draft_SV.float())
    assert error_of_arm(model, arm, 3) < 1e-6


# --- how much is accepted: a rule that never accepts would be lossless too -------------------------------------------------------------


def plain_acceptance(p: Tensor, q: Tensor, num_children: int) -> float:
    """The chance that one of the children is accepted, from the reference form in LAW.md 3.1."""
    if num_children == 0 or q.sum() == 0:
        return 0.0
    total = 0.0
    for child in q.nonzero().flatten().tolist():
        accepts = min(1.0, float(p[child] / q[child]))
        rest, others = (p - q).clamp(min=0), q.clone()
        others[child] = 0
        later = 0.0
        if accepts < 1:
            later = plain_acceptance(rest / rest.sum(), others / others.sum() if others.sum() > 0 else others, num_children - 1)
        total += float(q[child]) * (accepts + (1 - accepts) * later)
    return total


@pytest.mark.parametrize("num_children", range(1, 6))
def test_acceptance_of_the_reference_form(num_children):
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        p, q = (torch.randn(4, generator=generator, dtype=torch.float64).mul(1.5).softmax(0) for _ in range(2))
        found = acceptance(constant_model(p, q), static_arm(*((rank,) for rank in range(num_children))))
        assert found == pytest.approx(plain_acceptance(p, q, num_children), abs=1e-12)
        if num_children == 1:
            assert found == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-12)
        elif num_children >= 4:
            assert found == pytest.approx(1, abs=1e-12)  # every token is a child


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("kind", ("plain", "holes", "missing", "truncated"))
def test_one_child_a_node_is_a_chain(kind, temperature):
    """Not only in the text's law, but in how many tokens a cycle emits."""
    model = random_model(kind, num_tokens=4, seed=5)
    after = [
        enumerate_cycles(model, replace(arm, temperature=temperature), starts(model, 3, 0), [0])
        for arm in (static_arm((0,), (0, 0)), Arm(method="chain", width=1, depth=2, size=3))
    ]
    assert torch.allclose(*after, atol=1e-12, rtol=0)


# --- shape ---------------------------------------------------------------------------------------------------------------------------


def grow_rows(model: TableModel, arm: Arm, temperature_B: Tensor) -> Tree:
    row_B = torch.arange(len(temperature_B))
    return build_static_trees(model, arm, KeyedDraws(row_B * 15485863), row_B, torch.zeros_like(row_B), temperature_B)


@pytest.mark.parametrize("temperature", (1.0, 0.0))
@pytest.mark.parametrize("kind", ("ties", "underflow", "holes", "missing"))
@pytest.mark.parametrize("draft_top", (0, 2))
@by_shape
def test_every_node_that_the_support_allows(arm, draft_top, kind, temperature):
    """A node has as many children as its shape says, or as its law has tokens. At T = 0 they are the top ones, in order."""
    model, num_rows = random_model(kind, num_tokens=5, seed=6), 24
    tree = grow_rows(model, replace(arm, draft_top=draft_top), torch.full((num_rows,), temperature))
    node_R = torch.arange(tree.token_BR.shape[1])
    assert torch.equal(tree.exists_BR, node_R < tree.size_B.unsqueeze(1))
    assert torch.equal(tree.sampled_BR, tree.exists_BR & (node_R > 0) & (temperature > 0))
    for row in range(num_rows):
        path, text = {0: ()}, {0: row}
        for node in range(int(tree.size_B[row])):
            children = [n for n in range(1, int(tree.size_B[row])) if int(tree.parent_BR[row, n]) == node]
            logits = model.draft_logits(torch.tensor(text[node]))
            kept, kept_token = ranked(logits, draft_top or len(logits))
            support = kept_token[kept.softmax(0) > 0] if temperature else kept_token[kept > -torch.inf]
            num_asked = sum(p[:-1] == path[node] for p in arm.paths)
            assert len(children) == min(num_asked, len(support))
            assert tree.slot_BR[row, children].tolist() == list(range(len(children)))
            tokens = tree.token_BR[row, children].tolist()
            allowed = model.target_token_V[support].tolist()
            assert len(set(tokens)) == len(tokens) and set(tokens) <= set(allowed)
            if temperature == 0:
                assert tokens == allowed[: len(tokens)]
            for child, rank, token in zip(children, range(len(children)), tokens, strict=True):
                assert child > node and int(tree.depth_BR[row, child]) == len(path[node]) + 1
                path[child], text[child] = (*path[node], rank), int(model.child(torch.tensor(text[node]), torch.tensor(token)))
        assert len(path) == int(tree.size_B[row])


def test_draft_runs_where_there_are_children_only():
    arm, calls = static_arm((0,), (1,), (2,), (0, 0), (2, 0), (2, 1), (2, 1, 0)), []

    def expand(token_BF: Tensor, parent_BF: Tensor) -> Tensor:
        calls.append(parent_BF.tolist())
        return torch.zeros(*token_BF.shape, 5)

    active_B = torch.tensor([True, False, True])
    levels = lay_out(arm.paths[::-1], torch.device("cpu"))  # the order of the paths does not matter
    tree = grow_static(
        torch.zeros(3, 5),
        expand,
        levels,
        draft_top=0,
        temperature_B=torch.tensor([1.0, 1.0, 0.0]),
        cycle_B=torch.zeros(3, dtype=torch.long),
        draws=KeyedDraws(torch.arange(3)),
        active_B=active_B,
        target_token_V=torch.arange(5),
    )
    assert calls == [[[0, 0]] * 3, [[1]] * 3]  # nodes (0,) and (2,) of the root, then (2, 1) of the second of them
    assert tree.size_B.tolist() == [8, 1, 8]
    assert tree.parent_BR[0].tolist() == [0, 0, 0, 0, 1, 3, 3, 6]
    bare = root_only(1, torch.device("cpu"))
    for name in ("token_BR", "parent_BR", "depth_BR", "exists_BR", "sampled_BR", "slot_BR"):
        assert torch.equal(getattr(tree, name)[1:2, :1], getattr(bare, name)), name


@pytest.mark.parametrize("kind", ("plain", "holes", "truncated"))
@by_shape
def test_temperatures_share_a_batch(arm, kind):
    """Rows at T = 0 among others: each row's tree and text are what they are when the whole batch has its temperature."""
    model, num_rows = random_model(kind, num_tokens=5, seed=7), 80

    def cycle(temperature_B: Tensor) -> dict[str, Tensor]:
        tree = grow_rows(model, arm, temperature_B)
        text_BR = torch.arange(num_rows).unsqueeze(1).repeat(1, tree.token_BR.shape[1])
        for node in range(1, text_BR.shape[1]):
            text_BR[:, node] = model.child(text_BR.gather(1, tree.parent_BR[:, node : node + 1]).squeeze(1), tree.token_BR[:, node])
        tables = {t: model.law_table(t) for t in TEMPERATURES}

        def law_at(node_B: Tensor, active_B: Tensor) -> Tensor:
            index_B = text_BR.gather(1, node_B.unsqueeze(1)).squeeze(1) % len(model.target_SV)
            return torch.stack([tables[t][index] for t, index in zip(temperature_B.tolist(), index_B, strict=True)])

        draws = KeyedDraws(torch.arange(num_rows) * 15485863)
        verdict = verification.verify(tree, law_at, verification.without_replacement, draws, torch.zeros(num_rows, dtype=torch.long))
        columns = {f.name: getattr(tree, f.name) for f in fields(Tree) if f.name not in ("proposal", "max_depth")}
        return columns | {"token_BL": verdict.token_BL, "num_accepted_B": verdict.num_accepted_B}

    temperature_B = torch.tensor(TEMPERATURES, dtype=torch.float64).repeat(num_rows // len(TEMPERATURES))
    mixed = cycle(temperature_B)
    assert len(mixed["token_BL"].unique()) > 4
    for temperature in TEMPERATURES:
        alone = cycle(torch.full_like(temperature_B, temperature))
        for name, column in mixed.items():
            assert torch.equal(column[temperature_B == temperature], alone[name][temperature_B == temperature]), name
