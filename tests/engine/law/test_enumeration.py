"""E[Pr(text)] = p(text) for every text over at least two cycles, by exact enumeration through the production code (LAW.md 2.5 and 5)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from enumeration import Arm, TableModel, enumerate_cycles, error_of_arm, random_model, starts
from torch import Tensor

from engine.law.growth import Pool

KINDS = ("plain", "ties", "near_empty", "underflow", "holes", "missing", "truncated", "worked", "overflow")
TEMPERATURES = (0.3, 1.0, 1.5, 0.0)
ARMS = {
    "m0": Arm(m=0),
    "m1": Arm(m=1),
    "m2": Arm(m=2),
    "m0-leads-first": Arm(m=0, rule="deterministic_first"),
    "m1-leads-first": Arm(m=1, rule="deterministic_first"),
    "m2-leads-first": Arm(m=2, rule="deterministic_first"),
    "topk": Arm(method="topk"),
    "chain": Arm(method="chain", width=1),
    "off": Arm(method="off", depth=0),
}
RHEO = {name: arm for name, arm in ARMS.items() if arm.method == "rheo"}


def ragged(pool: Pool, text_B: Tensor, cycle_B: Tensor) -> Tensor:
    """A tree size for each row, from what is known before this cycle's draws: the text (so the acceptance of past cycles too)."""
    return 1 + (text_B + 3 * cycle_B) % 10


def check(model: TableModel, arm: Arm, num_tokens: int, **options) -> None:
    error = error_of_arm(model, arm, num_tokens, **options)
    print(f"error {error:.1e}")
    assert error < 1e-12


def by_name(arms: dict[str, Arm]):
    return pytest.mark.parametrize("arm", arms.values(), ids=arms)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("kind", KINDS)
@by_name(ARMS)
def test_every_method(arm, kind, temperature):
    arm = replace(arm, temperature=temperature, size=ragged)
    check(random_model(kind), arm, 4, start_length=1)


@pytest.mark.parametrize("size", range(1, 5))
@pytest.mark.parametrize("kind", ("plain", "ties", "worked"))
@by_name({name: arm for name, arm in ARMS.items() if arm.method != "off"})
def test_every_size(arm, kind, size):
    check(random_model(kind, seed=1), replace(arm, size=size), 4)


@pytest.mark.parametrize("kind", KINDS)
@by_name(ARMS)
def test_two_levels(arm, kind):
    """Three tokens with every slot filled: what one node draws decides which others are expanded and kept."""
    model = random_model(kind, num_tokens=4 if kind == "missing" else 3, seed=2)
    check(model, replace(arm, depth=min(arm.depth, 1) * 2, size=ragged), 4)


@pytest.mark.parametrize("kind, size", [*(("plain", size) for size in range(2, 14)), *(("near_empty", size) for size in (4, 8, 9, 10))])
@by_name({name: RHEO[name] for name in ("m0", "m1")})
def test_two_levels_every_size(arm, kind, size):
    check(random_model(kind, num_tokens=3, seed=3), replace(arm, depth=2, size=size), 3)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("kind", ("plain", "ties", "near_empty", "holes"))
def test_three_levels(kind, temperature):
    model = random_model(kind, num_tokens=3, seed=4)
    for arm in (Arm(m=1, width=3 if temperature == 1 else 2), Arm(m=0, width=2, top_k=2), Arm(method="topk"), Arm(method="chain", width=1)):
        check(model, replace(arm, depth=3, size=ragged, temperature=temperature), 4)


@pytest.mark.parametrize("size", (3, 5, 6, 8))
def test_three_levels_every_size(size):
    check(random_model("plain", num_tokens=3, seed=5), Arm(m=1, depth=3, size=size), 3)


@pytest.mark.parametrize("kind", ("plain", "ties", "holes"))
@pytest.mark.parametrize("m", range(4))
@pytest.mark.parametrize("rule", ("stochastic_first", "deterministic_first"))
def test_four_slots(rule, m, kind):
    model = random_model(kind, num_tokens=5, seed=6)
    check(model, Arm(m=m, top_k=4, rule=rule, size=ragged, temperature=1.5), 2)
    check(model, Arm(m=m, top_k=4, rule=rule, depth=2, width=2, size=ragged), 2)


@pytest.mark.parametrize("draft_top", (1, 2, 3))
@pytest.mark.parametrize("kind", ("plain", "ties", "missing"))
@by_name({**RHEO, "m3": Arm(m=3, top_k=4), "chain": ARMS["chain"]})
def test_truncated_draft(arm, kind, draft_top):
    """The draft keeps fewer tokens than there are slots, and even than there are leads."""
    model = random_model(kind, num_tokens=5, seed=7)
    check(model, replace(arm, draft_top=draft_top, size=ragged, temperature=0.7), 2, start_length=1)
    check(model, replace(arm, draft_top=draft_top, size=ragged, depth=2, width=2), 2)


JOINT = {
    "m0": (Arm(m=0, top_k=3, size=3), 3),
    "m1": (Arm(m=1, top_k=3, size=3), 4),
    "m1-leads-first": (Arm(m=1, top_k=3, size=3, rule="deterministic_first"), 4),
    "m0-two-levels": (Arm(m=0, top_k=2, width=2, depth=2, size=4), 3),
    "m1-two-levels": (Arm(m=1, top_k=2, width=2, depth=2, size=4), 3),
    "chain": (Arm(method="chain", width=1, depth=2, size=3), 3),
    "topk": (Arm(method="topk", depth=2, size=6), 3),
    "off": (Arm(method="off", depth=0), 4),
}


@pytest.mark.parametrize("kind", ("plain", "ties", "near_empty"))
@pytest.mark.parametrize("arm, num_tokens", JOINT.values(), ids=JOINT)
def test_cycles_share_no_randomness(arm, num_tokens, kind):
    """One script over both cycles: a key that the second asks again would be seen."""
    check(random_model(kind, num_tokens=num_tokens, seed=8), arm, 2 * (arm.depth + 1), joint=True)


def test_three_cycles():
    check(random_model("plain", num_tokens=3, seed=9), Arm(m=1, depth=1, size=3), 6, cycles=3, joint=True)
    check(random_model("plain", num_tokens=3, seed=9), Arm(m=1, depth=2, size=ragged), 5, cycles=4)


@pytest.mark.parametrize("kind", ("plain", "near_empty", "underflow", "overflow"))
@by_name(ARMS)
def test_single_precision(arm, kind):
    """As the engine runs: tables and laws in fp32, exact up to its rounding."""
    model = random_model(kind, num_tokens=3, seed=10)
    model = replace(model, target_SV=model.target_SV.float(), draft_SV=model.draft_SV.float())
    assert error_of_arm(model, replace(arm, depth=2 * min(arm.depth, 1), size=ragged), 3) < 1e-6


def test_worlds_have_mass_one():
    model = random_model("plain", seed=11)
    after = enumerate_cycles(model, Arm(m=1, depth=2, size=5), starts(model, 4, 0), [0])
    mass = [float(after[model.first_text(length) : model.first_text(length + 1)].sum()) for length in range(5)]
    assert abs(sum(mass) - 1) < 1e-14
    assert mass[0] == mass[4] == 0 and min(mass[1:4]) > 0.01  # walks end at every depth
