"""Mutants of the production code, each a mistake that was made somewhere (LAW.md 2.5, FIELD-CASES): the enumeration must see them all.

A mutant replaces one piece of a module's source. The same setting is exact without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from enumeration import Arm, TableModel, acceptance, constant_model, error_of_arm, law_of_arm, random_model
from torch import Tensor

from engine.law import candidates, growth, static, tree, verification
from engine.law.growth import Pool


def mutate(monkeypatch: pytest.MonkeyPatch, module: ModuleType, old: str, new: str) -> None:
    source = Path(module.__file__).read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{module.__name__} has changed: this mutant needs a new place, for {old!r}"
    mutant = ModuleType(module.__name__)
    exec(compile(source.replace(old, new), f"mutant of {module.__file__}", "exec"), vars(mutant))
    for name, value in vars(mutant).items():
        if not name.startswith("__"):
            monkeypatch.setattr(module, name, value)


@dataclass(frozen=True, kw_only=True)
class Mutant:
    module: ModuleType
    old: str
    new: str
    arm: Arm
    kind: str = "plain"
    seed: int = 20
    num_tokens: int = 3  # of the vocabulary
    length: int = 3  # of the texts
    options: dict = field(default_factory=dict)
    below_floor: bool = False  # production's own assertion on the rank floor sees it too

    def model(self) -> TableModel:
        return random_model(self.kind, num_tokens=self.num_tokens, seed=self.seed)


PROXY = "torch.minimum(q_BFM[..., last_lead], residual_mass(q_BFM, m))"
ORDER = "order_BP = pool.score_BP.sort(dim=-1, descending=True, stable=True).indices"
COIN = "accept_probability(visit.p_BV, sampled), sampled.exists_B, Purpose.ACCEPT, visit.position_B"

MUTANTS = {
    "proxy below the floor, m = 1": Mutant(
        module=candidates, old=PROXY, new=f"0.5 * {PROXY}", arm=Arm(m=1, size=3), num_tokens=4, below_floor=True
    ),
    "proxy below the floor, m = 0": Mutant(
        module=candidates, old="(q_BFM[..., 0] + ABOVE_TOP).clamp(max=1)", new="0.4 * q_BFM[..., 0]", arm=Arm(m=0, size=2), below_floor=True
    ),
    "z as one minus a sum": Mutant(
        module=candidates,
        old="return q_BFM[..., m:].sum(-1)",
        new="return (1 - q_BFM[..., :m].float().sum(-1)).to(q_BFM.dtype)",
        kind="near_empty",
        seed=29,
        arm=Arm(m=1, depth=2, size=9),
        below_floor=True,
    ),
    "sampled token scored by its true q": Mutant(
        module=candidates,
        old="torch.where(slot_K == self.m, proxy_BF.unsqueeze(-1), q_BFM.gather(-1, rank_BFK))",
        new="q_BFM.gather(-1, rank_BFK)",
        arm=Arm(m=1, size=3),
        num_tokens=4,
    ),
    "ties by token id": Mutant(
        module=tree,
        old=ORDER,
        new="by_id = pool.token_BP.sort(dim=-1, stable=True).indices; "
        "order_BP = by_id.gather(1, pool.score_BP.gather(1, by_id).sort(dim=-1, descending=True, stable=True).indices)",
        kind="ties",
        arm=Arm(m=1, size=2),
    ),
    "the last of equals first": Mutant(
        module=tree,
        old=ORDER,
        new=ORDER.replace("score_BP", "score_BP.flip(1)") + ".neg() + pool.score_BP.shape[1] - 1",
        kind="ties",
        arm=Arm(m=1, size=2),
    ),
    "verification against untruncated q": Mutant(
        module=candidates,
        old="proposal=Proposal(token=token_BFM, probability=proposal_BFM)",
        new="proposal=Proposal(token=torch.arange(logits_BFV.shape[-1]).expand_as(logits_BFV), "
        "probability=softmax_at(logits_BFV, self.temperature_B.unsqueeze(-1).expand(has_sample_BF.shape)))",
        arm=Arm(m=0, draft_top=2, size=3),
        num_tokens=4,
    ),
    "drawn at one temperature, claimed at another": Mutant(
        module=candidates,
        old="proposal_BFM, frontier.active_BF & has_sample_BF",
        new="softmax_at(residual_logits_BFM, torch.ones_like(residual_logits_BFM[..., 0])), frontier.active_BF & has_sample_BF",
        arm=Arm(m=1, temperature=0.3, size=4),
        num_tokens=4,
    ),
    "argmax drawn, full softmax claimed": Mutant(
        module=candidates,
        old="slot_K = torch.arange(self.top_k, device=logits_BFV.device)",
        new="slot_K = torch.arange(self.top_k); sampled_rank_BF = torch.full_like(sampled_rank_BF, self.m)",
        arm=Arm(m=0, size=2),
    ),
    "draws shared by a level": Mutant(
        module=growth,
        old="path_BF = fold(path_BF.gather(1, parent_BF), slot_C[beam_BF])",
        new="path_BF = fold(path_BF.gather(1, parent_BF), 0)",
        seed=31,
        arm=Arm(m=1, depth=2, size=7),
        options={"cycles": 1},
    ),
    "draft noise reused as the accept coin": Mutant(
        module=verification,
        old=COIN,
        new=COIN.replace("ACCEPT, visit.position_B", "DRAFT, torch.zeros_like(visit.position_B), torch.zeros_like(visit.position_B)"),
        arm=Arm(m=0, size=2),
        length=2,
        options={"cycles": 1},
    ),
    "one key for the coin and the residual": Mutant(
        module=verification,
        old="torch.where(sampled.exists_B, int(Purpose.RESIDUAL), int(Purpose.BONUS))",
        new="torch.where(sampled.exists_B, int(Purpose.ACCEPT), int(Purpose.BONUS))",
        arm=Arm(m=0, size=2),
        num_tokens=4,
    ),
    "one coin for all positions": Mutant(
        module=verification,
        old=COIN,
        new=COIN.replace("visit.position_B", "torch.zeros_like(visit.position_B)"),
        arm=Arm(m=0, depth=2, size=5),
    ),
    "draft keys without the cycle": Mutant(
        module=candidates,
        old="Purpose.DRAFT, self.cycle_B.unsqueeze(-1), frontier.path_BF",
        new="Purpose.DRAFT, torch.zeros_like(frontier.path_BF), frontier.path_BF",
        arm=Arm(m=0, size=3),
        length=4,
        options={"joint": True},
    ),
    "leads first, then x_s against all of p": Mutant(
        module=verification,
        old="rest_BV = rest_BV / torch.where(is_trial_B, rest_BV.sum(-1), 1).unsqueeze(-1)",
        new="pass",
        arm=Arm(m=1, size=4, rule="deterministic_first"),
    ),
    "residual subtracts q at the drafted token only": Mutant(
        module=verification,
        old="residual(visit.p_BV, sampled.q_BV)",
        new="residual(visit.p_BV, sampled.q_BV * torch.nn.functional.one_hot(sampled.token_B, sampled.q_BV.shape[1]))",
        arm=Arm(m=0, size=2),
    ),
    "residual not subtracted": Mutant(
        module=verification, old="residual(visit.p_BV, sampled.q_BV)", new="visit.p_BV", arm=Arm(m=1, size=4)
    ),
}

CLAIMED = "token=token_BFM, probability=law_BFM"
WIDE = Arm(method="static", depth=1, paths=((0,), (1,)))
BUSHY = Arm(method="static", depth=2, paths=((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)))
NEXT_Q = "remove(q_BO, index_B)"
TRIAL_KEY = "Purpose.ACCEPT, visit.position_B, torch.full_like(visit.position_B, rank)"
DRAW_KEY = "Purpose.DRAFT, cycle_B1, path_F, torch.full_like(path_F, rank)"
DRAWN = "torch.stack(indices, -1)"

MUTANTS |= {
    "static: Q not renormalised after a rejection": Mutant(
        module=verification, old=NEXT_Q, new="q_BO.scatter(-1, index_B.unsqueeze(-1), 0)", arm=WIDE
    ),
    "static: Q keeps the rejected token": Mutant(module=verification, old=NEXT_Q, new="q_BO", arm=WIDE),
    "static: P not renormalised after a rejection": Mutant(
        module=verification, old="normalise(residual(p_BO, q_BO))", new="residual(p_BO, q_BO)", arm=WIDE
    ),
    "static: P only loses the rejected token": Mutant(
        module=verification, old="normalise(residual(p_BO, q_BO))", new="remove(p_BO, index_B)", arm=WIDE
    ),
    "static: drawn with replacement": Mutant(module=static, old="law_BFM = remove(law_BFM, index_BF)", new="pass", arm=WIDE),
    "static: tried by probability": Mutant(module=static, old=DRAWN, new=f"{DRAWN}.sort(-1).values", arm=WIDE, num_tokens=4),
    "static: tried last to first": Mutant(
        module=verification, old="tree.slot_BR == rank", new="tree.slot_BR == tree.proposal.num_draws - 1 - rank", arm=WIDE
    ),
    "static: one coin for all ranks": Mutant(
        module=verification, old=TRIAL_KEY, new=TRIAL_KEY.replace(", rank)", ", 0)"), arm=WIDE, num_tokens=4
    ),
    "static: one draw for all ranks": Mutant(module=static, old=DRAW_KEY, new=DRAW_KEY.replace(", rank)", ", 0)"), arm=WIDE),
    "static: draws shared by a node and its child": Mutant(
        module=static, old="path_F = fold(path_F[parent_F], level.rank_C[level.inner])", new="path_F = path_F[parent_F]", arm=BUSHY
    ),
    "static: draft keys without the cycle": Mutant(
        module=static, old=DRAW_KEY, new=DRAW_KEY.replace("cycle_B1", "0 * cycle_B1"), arm=WIDE, length=4, options={"joint": True}
    ),
    "static: draft noise reused as the accept coin": Mutant(
        module=verification,
        old=TRIAL_KEY,
        new="Purpose.DRAFT, 0 * visit.position_B, 0 * visit.position_B, torch.full_like(visit.position_B, rank)",
        arm=WIDE,
        length=2,
        options={"cycles": 1},
    ),
    "static: verification against untruncated q": Mutant(
        module=static,
        old=CLAIMED,
        new="token=(whole := keep_top(logits_BFV, 0))[1], probability=softmax_at(whole[0], temperature_B.unsqueeze(-1))",
        arm=replace(WIDE, draft_top=2),
        num_tokens=4,
    ),
    "static: drawn at one temperature, claimed at another": Mutant(
        module=static,
        old=CLAIMED,
        new="token=token_BFM, probability=softmax_at(logits_BFM, torch.ones_like(logits_BFM[..., 0]))",
        arm=replace(WIDE, temperature=0.3),
    ),
    "static: others share what is left evenly": Mutant(
        module=verification,
        old="rest_BV = (outside_BV * share_B1)",
        new="rest_BV = ((outside_BV > 0) * p_BO[:, -1:] / (outside_BV > 0).sum(-1, keepdim=True).clamp(min=1))",
        arm=replace(WIDE, draft_top=2),
        num_tokens=5,
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_mutant_is_seen(monkeypatch, mutant):
    def error() -> float:
        return error_of_arm(mutant.model(), mutant.arm, mutant.length, **mutant.options)

    assert error() < 1e-12
    mutate(monkeypatch, mutant.module, mutant.old, mutant.new)
    if mutant.below_floor:
        with pytest.raises(RuntimeError, match="rank floor"):
            error()
        monkeypatch.setattr(torch, "_assert_async", lambda *_: None)
    found = error()
    print(f"error {found:.4f}")
    assert not found <= 1e-4  # a division of 0 by 0 is seen too


def expected_accepted(pool: Pool) -> Tensor:
    """The draft's estimate of how much of the tree will be accepted: of this cycle's draws, so no tree size may follow from it."""
    return pool.score_BP.exp().sum(-1)


@pytest.mark.parametrize("method, is_seen", [("rheo", True), ("topk", False)])
def test_tree_size_from_this_cycles_scores(method, is_seen):
    """LAW.md section 6: a mutant for `rheo`, harmless where candidates are not drawn."""
    model = random_model("plain", num_tokens=3, seed=24)
    arm = Arm(method=method, m=1, depth=2, size=lambda pool, *_: 2 + 3 * (expected_accepted(pool) > 2.4).long())
    error = error_of_arm(model, arm, 3)
    print(f"error {error:.4f}")
    assert error > 1e-4 if is_seen else error < 1e-12


PUBLIC_BUGS = {  # of FIELD-CASES section B, with the law and the acceptance that they give
    "B1": (MUTANTS["verification against untruncated q"], 2, 0.70, [0.5, 0.375, 0.0625, 0.0625], 0.875),
    "B2": (MUTANTS["residual subtracts q at the drafted token only"], 0, 0.90, [0.4, 0.35, 11 / 60, 1 / 15], 0.90),
    "B3": (MUTANTS["argmax drawn, full softmax claimed"], 0, 0.90, [0.8, 0.0, 0.1, 0.1], 0.80),
}


@pytest.mark.parametrize("mutant, draft_top, right_acceptance, wrong_law, wrong_acceptance", PUBLIC_BUGS.values(), ids=PUBLIC_BUGS)
def test_public_bug_by_its_numbers(monkeypatch, mutant, draft_top, right_acceptance, wrong_law, wrong_acceptance):
    p = [0.4, 0.3, 0.2, 0.1]
    model, arm = constant_model(p, [0.5, 0.3, 0.15, 0.05]), Arm(method="chain", width=1, size=2, draft_top=draft_top)
    assert law_of_arm(model, arm, 1, cycles=1).tolist() == pytest.approx(p, abs=1e-12)
    assert acceptance(model, arm) == pytest.approx(right_acceptance, abs=1e-12)
    mutate(monkeypatch, mutant.module, mutant.old, mutant.new)
    assert law_of_arm(model, arm, 1, cycles=1).tolist() == pytest.approx(wrong_law, abs=1e-12)
    assert acceptance(model, arm) == pytest.approx(wrong_acceptance, abs=1e-12)
