"""A job that is killed and started again at once. Hundreds of kills, with a real engine and on more than one node too:
`python -m jobs.chaos.run`, and its results in jobs/results/chaos.
"""

import signal

import pytest

from jobs.chaos.moments import Moment, Moments


@pytest.mark.parametrize(("mode", "seed"), [("fake", 1), ("s3", 3)])
def test_nothing_is_lost_and_nothing_is_there_twice(run_chaos, mode, seed):
    report = run_chaos(mode, seed)
    assert report.findings == []
    assert report.kills
    assert report.verdict.is_good, report.verdict
    assert report.num_rows > 50
    assert report.num_looks > 20


def test_a_node_of_a_cluster_is_lost(run_chaos, monkeypatch):
    """With the engine and the readers on it: the job goes on, or ends with an engine failure and goes on when it is started again."""
    monkeypatch.setattr(Moments, "draw", lambda *_, **__: Moment("rows", "node", signal.SIGKILL, 0.5))
    report = run_chaos("cluster", 1)
    assert report.findings == []
    assert [kill.victim for kill in report.kills] == ["a node"]
    assert report.verdict.is_good, report.verdict
