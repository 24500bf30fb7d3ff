"""Chaos jobs, small enough for every run of the tests; jobs/chaos has the long ones."""

from __future__ import annotations

import random

import pytest

from jobs.chaos.job import ChaosJob
from jobs.chaos.modes import MODES
from jobs.chaos.report import Report


@pytest.fixture(scope="session")
def references():
    """What undisturbed runs of the fake engine made."""
    return {}


@pytest.fixture
def run_chaos(tmp_path_factory, monkeypatch, references):
    """Runs a job of a few rows that is killed once."""

    def run(mode: str, seed: int) -> Report:
        folder = tmp_path_factory.mktemp(mode)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        with MODES[mode](folder) as options:
            job = ChaosJob(
                options,
                0,
                random.Random(seed),
                folder / "job",
                scenario="plain",
                references=references,
                boot_s=5.0,
                max_kills=1,
                more_writes=True,
                scale=0.2,
            )
            return job.run()

    return run
