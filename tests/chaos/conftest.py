"""Chaos jobs, small enough for every run of the tests; jobs/chaos has the long ones."""

from __future__ import annotations

import random

import pytest

from jobs.chaos.job import ChaosJob
from jobs.chaos.modes import MODES
from jobs.chaos.report import Report


@pytest.fixture
def run_chaos(tmp_path_factory, monkeypatch):
    """Runs a job of a few rows until so many kills are over."""

    def run(mode: str, scenario: str, num_kills: int, seed: int) -> Report:
        folder = tmp_path_factory.mktemp(mode)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        with MODES[mode](folder) as options:
            job = ChaosJob(
                options,
                0,
                random.Random(seed),
                folder / "job",
                scenario=scenario,
                references={},
                boot_s=5.0,
                max_kills=num_kills,
                more_writes=True,
                scale=0.2,
            )
            return job.run()

    return run
