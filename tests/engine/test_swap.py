"""The swap test (LAW.md 5.3), at full size on the real pair: a sampled token's survival does not depend on which token was drawn, and at
each node the law of what verification emits is p, over the whole vocabulary."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engine import Speculation, Verification, drafting
from engine.budget.plan import Plan, Setting
from engine.law import candidates, verification
from engine.law.draws import KeyedDraws, Purpose
from engine.law.keys import fold
from engine.law.tree import Tree, best_entries
from engine.law.verification import RULES, Visit
from engine.row_tensors import RowTensors
from tests.engine.real_pair import load_real_pair, needs_real_pair, real_requests

pytestmark = needs_real_pair
_SWAPPED_NODES = (0, 1, 2, 5, 10, 11, 17, 30, 45, 60)  # of the 71 that are expanded: the root, and nodes of several levels


class _SwappedDraws(KeyedDraws):
    """Draws the token of one node of each row anew; every other key stays. Keeps the paths it was asked for."""

    def __init__(self, row_key_B: Tensor, swapped_path_B: Tensor | None):
        super().__init__(row_key_B)
        self.swapped_path_B = swapped_path_B
        self.paths: list[Tensor] = []

    def key(self, ndim: int, purpose: Tensor | int, *coordinates: Tensor) -> Tensor:
        key = super().key(ndim, purpose, *coordinates)
        if purpose is Purpose.DRAFT:
            path_BF = coordinates[1]
            self.paths.append(path_BF)
            if self.swapped_path_B is not None:
                key = torch.where(path_BF == self.swapped_path_B.unsqueeze(-1), fold(key, 12345), key)
        return key


@dataclasses.dataclass(frozen=True)
class _Drafted:
    """path_BE and the drawn token of each expanded node, and whether it is in the tree."""

    path_BE: Tensor
    token_BE: Tensor
    survives_BE: Tensor


class _Drafts:
    """Drafts the same cycle of the real pair again and again, from the same state."""

    def __init__(self, monkeypatch, m: int):
        engine = load_real_pair(Speculation(method="rheo", m=m, tree_size=60, depth=8, top_k=10))
        for request in real_requests(max_tokens=40):
            engine.submit(request)
        for _ in range(3):
            engine.step()
        self._rows, self._drafter = engine.running, engine.decoder.drafter
        self._state = [(row.num_draft_cached, row.pending_TF) for row in self._rows]
        self._pools = []
        prune = drafting.prune

        def keep_pool(pool, *args):
            self._pools.append(pool)
            return prune(pool, *args)

        monkeypatch.setattr(drafting, "prune", keep_pool)

    @torch.inference_mode()
    def draft(self, swapped_path_B: Tensor | None = None) -> _Drafted:
        for row, (num_draft_cached, pending_TF) in zip(self._rows, self._state, strict=True):
            row.num_draft_cached, row.pending_TF = num_draft_cached, pending_TF
        tensors = RowTensors(self._rows, 49152, torch.device("cpu"), lambda key_B: _SwappedDraws(key_B, swapped_path_B))
        size_B = torch.full((len(self._rows),), 60)
        self._drafter.draft(self._rows, tensors, Plan(Setting(60, 8), size_B.tolist()))
        pool = self._pools.pop()
        path_BE = torch.cat(tensors.draws.paths, 1)
        kept_BP, _ = best_entries(pool, size_B - 1)

        def of_sampled(column_BP: Tensor) -> Tensor:
            origin_BP = torch.where(pool.sampled_BP, pool.origin_BP, path_BE.shape[1])
            return column_BP.new_zeros(len(path_BE), path_BE.shape[1] + 1).scatter_(1, origin_BP, column_BP)[:, :-1]

        return _Drafted(path_BE, of_sampled(pool.token_BP), of_sampled(kept_BP.long()).bool())


def _survival_changes(drafts: _Drafts, nodes: Sequence[int] = _SWAPPED_NODES) -> tuple[int, int, int]:
    """(nodes whose survival changed, tokens that changed, nodes redrawn)."""
    before = drafts.draft()
    changed = redrawn = compared = 0
    for node in nodes:
        path_B = before.path_BE[:, node]
        after = drafts.draft(path_B)
        is_node_BE = after.path_BE == path_B.unsqueeze(-1)
        assert (is_node_BE.sum(-1) == 1).all(), "a node's own draw moved the node itself"
        survives_B = (after.survives_BE & is_node_BE).any(-1)
        token_B = (after.token_BE * is_node_BE).sum(-1)
        changed += int((survives_B != before.survives_BE[:, node]).sum())
        redrawn += int((token_B != before.token_BE[:, node]).sum())
        compared += len(path_B)
    return changed, redrawn, compared


@pytest.mark.parametrize("m", [0, 1, 2])
def test_survival_does_not_depend_on_the_token(monkeypatch, m):
    changed, redrawn, compared = _survival_changes(_Drafts(monkeypatch, m))
    assert changed == 0
    assert redrawn > compared // 4, "the swap must draw other tokens"


def test_a_proxy_below_the_floor_is_seen(monkeypatch):
    monkeypatch.setattr(candidates, "proxy", lambda q_BFM, m: 0.9 * q_BFM[..., m])
    monkeypatch.setattr(torch, "_assert_async", lambda *_: None)
    # few draws stand at the edge of a tree, so more of them are tried
    changed, _, _ = _survival_changes(_Drafts(monkeypatch, 1), range(0, 71, 2))
    assert changed > 0


class _LawDraws:
    """Takes down the probability of each accept coin and the weights of each draw; every coin falls on rejection."""

    def __init__(self) -> None:
        self.coins: list[Tensor] = []
        self.weights: list[Tensor] = []

    def bernoulli(self, probability, active, purpose, *coordinates):
        self.coins.append(torch.where(active, probability, 0))
        return torch.zeros_like(active)

    def categorical(self, weight, active, purpose, *coordinates):
        self.weights.append(weight)
        # of the leads' draw: the last token, which no lead holds in these tests
        return torch.full(active.shape, weight.shape[-1] - 1)


def _emission_law(tree: Tree, visit: Visit, row: int, order: str) -> Tensor:
    """Law of the token emitted at row's visited node [V], float64, over x_s ~ q~, the accept coin and the residual."""
    node = int((visit.child_BR[row] & tree.sampled_BR[row]).long().argmax())
    origin = int(tree.origin_BR[row, node])
    drawable = tree.proposal.probability[row, origin] > 0
    candidate_M = tree.proposal.token[row, origin][drawable]
    q_M = tree.proposal.probability[row, origin][drawable].double()
    count = len(candidate_M)
    token_BR = tree.token_BR[row].repeat(count, 1)
    token_BR[:, node] = candidate_M
    repeated = {
        field.name: getattr(tree, field.name)[row].expand(count, -1)
        for field in dataclasses.fields(tree)
        if field.name.endswith("_BR") and field.name != "token_BR"
    }
    proposal = dataclasses.replace(
        tree.proposal,
        token=tree.proposal.token[row].expand(count, -1, -1),
        probability=tree.proposal.probability[row].expand(count, -1, -1),
    )
    copies = Tree(token_BR=token_BR, proposal=proposal, max_depth=tree.max_depth, **repeated)
    copied_visit = Visit(
        p_BV=visit.p_BV[row].expand(count, -1),
        child_BR=visit.child_BR[row].expand(count, -1),
        position_B=visit.position_B[row].expand(count),
        active_B=torch.ones(count, dtype=torch.bool),
    )
    draws = _LawDraws()
    RULES[order](copies, copied_visit, draws)
    accept_M, rest_MV = draws.coins[0].double(), draws.weights[-1].double()
    trial_V = (q_M * (1 - accept_M)) @ (rest_MV / rest_MV.sum(-1, keepdim=True))
    trial_V = trial_V.index_add(0, candidate_M, q_M * accept_M)
    if order == "stochastic_first":
        return trial_V
    p_V = visit.p_BV[row].double()
    is_lead_R = visit.child_BR[row] & (tree.slot_BR[row] < tree.slot_BR[row, node])
    lead_V = torch.zeros_like(p_V).index_add(0, tree.token_BR[row][is_lead_R], torch.ones(int(is_lead_R.sum()), dtype=p_V.dtype)) * p_V
    return lead_V + (1 - lead_V.sum()) * trial_V


@pytest.mark.parametrize("order", RULES)
def test_each_node_emits_the_targets_law(order):
    engine = load_real_pair(Speculation(method="rheo", tree_size=60, depth=8, top_k=10, verification=Verification(order=order)))
    visits = []
    rule = engine.decoder.rule
    engine.decoder.rule = lambda tree, visit, draws: (visits.append((tree, visit)), rule(tree, visit, draws))[1]
    for request in real_requests(max_tokens=8):
        engine.submit(request)
    engine.step()
    engine.step()
    compared, deepest = 0, 0
    with torch.inference_mode():
        for tree, visit in visits:
            has_sample_B = (visit.child_BR & tree.sampled_BR).any(-1)
            for row in has_sample_B.nonzero().flatten().tolist():
                p_V = visit.p_BV[row].double()
                distance = 0.5 * float((_emission_law(tree, visit, row, order) - p_V / p_V.sum()).abs().sum())
                assert distance < 1e-5
                compared += 1
                deepest = max(deepest, int((tree.depth_BR[row] * visit.child_BR[row]).max()))
    assert compared >= 6 and deepest >= 2


def test_a_wrong_q_is_seen(monkeypatch):
    engine = load_real_pair(Speculation(method="rheo", tree_size=60, depth=8, top_k=10))
    visits = []
    rule = engine.decoder.rule
    engine.decoder.rule = lambda tree, visit, draws: (visits.append((tree, visit)), rule(tree, visit, draws))[1]
    engine.submit(real_requests(max_tokens=8)[0])
    engine.step()
    engine.step()
    tree, visit = next((tree, visit) for tree, visit in visits if (visit.child_BR & tree.sampled_BR).any())
    law_V = _emission_law(tree, visit, 0, "stochastic_first")
    # the coin divides by another q than the token was drawn from
    sampled_child = verification._sampled_child
    monkeypatch.setattr(
        verification,
        "_sampled_child",
        lambda *args: dataclasses.replace(sampled_child(*args), probability_B=sampled_child(*args).probability_B ** 0.5),
    )
    wrong_V = _emission_law(tree, visit, 0, "stochastic_first")
    assert 0.5 * float((law_V - wrong_V).abs().sum()) > 1e-3
