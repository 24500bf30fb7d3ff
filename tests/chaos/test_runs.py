"""A job that is killed and started again at once. Hundreds of kills, with a real engine and on more than one node too:
`python -m jobs.chaos.run`, and its results in jobs/results/chaos.
"""

import pytest


@pytest.mark.parametrize(("mode", "seed"), [("fake", 1), ("s3", 3)])
def test_nothing_is_lost_and_nothing_is_there_twice(run_chaos, mode, seed):
    report = run_chaos(mode, seed)
    assert report.findings == []
    assert report.kills
    assert report.verdict.is_good, report.verdict
    assert report.num_rows > 50
    assert report.num_looks > 20
