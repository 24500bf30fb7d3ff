"""Which state a run goes on from, and its learning rate."""

from __future__ import annotations

import itertools

import pytest

from jobs.train_draft import checkpoints
from jobs.train_draft.schedule import Schedule


def test_the_rate_rises_stays_and_falls():
    schedule = Schedule(steps=100, peak=1.0, warmup=10, decay=0.3)
    rates = [schedule(step) for step in range(100)]
    assert rates[0] == pytest.approx(1 / 11)
    assert rates[10:71] == [1.0] * 61
    assert all(one > other for one, other in itertools.pairwise(rates[70:]))
    assert 0 < rates[-1] < 0.04


def state(step: int, decay_from: int) -> dict:
    return {"step": step, "decay_from": decay_from}


@pytest.mark.parametrize(
    ("last", "decay_from", "expected"),
    [
        (state(50, 70), 70, 50),  # stopped before the fall
        (state(90, 70), 70, 90),  # stopped in the fall
        (state(100, 70), 140, 70),  # at its end, and now to be longer: back to where the fall began
        (state(90, 70), 80, 70),
    ],
)
def test_a_longer_run_goes_on_from_before_the_fall(tmp_path, last, decay_from, expected):
    checkpoints.save(tmp_path, checkpoints.LEVEL, state(70, 70))
    checkpoints.save(tmp_path, checkpoints.LAST, last)
    assert checkpoints.load(tmp_path, decay_from)["step"] == expected


def test_the_log_forgets_what_will_be_made_again(tmp_path):
    for step in (10, 20, 30):
        checkpoints.append_log(tmp_path, {"step": step})
    with open(tmp_path / checkpoints.LOG, "a") as file:
        file.write('{"step": 4')  # killed in the middle of a line
    checkpoints.cut_log(tmp_path, 20)
    assert [entry["step"] for entry in checkpoints.read_log(tmp_path)] == [10, 20]
