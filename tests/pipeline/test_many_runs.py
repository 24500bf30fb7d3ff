"""Runs on one folder without a lock, started, stopped and killed at any moment, in orders that a seed gives."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
from collections import Counter

import pytest

from engine.errors import UserError
from pipeline.runfile import job_of
from tests.pipeline.without_ray import NUM_ROWS, Killed, MakeRows, MemoryFolder

_COMMANDS = ((), ("output.retry_errors=true",), ("output.overwrite=true",))
_WAIT_S = 60


class Run(threading.Thread):
    """A run that waits for its turn before each operation on the folder. When it is killed, its last one is done, or not, or comes late."""

    def __init__(self, files: dict[str, bytes], rng: random.Random, late: list, start):
        super().__init__(daemon=True)
        self.outcome: int | Exception | None = None
        self.is_killed = False
        self._turn, self._waits = threading.Semaphore(0), threading.Semaphore(0)
        self._rng, self._late = rng, late
        self._folder = MemoryFolder(files)
        self._folder.act = self._act
        self._start = start
        self.start()

    def run(self):
        self._turn.acquire()
        try:
            self.outcome = self._start(self._folder)
        except Exception as error:  # looked at by the test
            self.outcome = error
        self._waits.release()

    def go_on(self, *, killed: bool) -> None:
        """Up to its next operation, or its end."""
        self._kill = killed
        self._turn.release()
        assert self._waits.acquire(timeout=_WAIT_S)

    def _act(self, what, name, do):
        if self.is_killed:
            raise Killed
        self._waits.release()
        self._turn.acquire()
        if not self._kill:
            return do()
        self.is_killed = True
        if what in ("create", "replace", "delete"):
            self._rng.choice([lambda: None, lambda: land(do), lambda: self._late.append(do)])()
        raise Killed


def land(do) -> None:
    with contextlib.suppress(FileExistsError):
        do()


def require_sound(folder: MemoryFolder) -> None:
    """No row of the job that is there is there twice."""
    if "run.json" in folder.files:
        present = job_of(folder.run["run_id"])
        rows = Counter((job_of(run_id), row) for run_id, row in folder.rows_by_run())
        assert all(times == 1 for (job_id, _), times in rows.items() if job_id == present), rows


def complete(run_on, folder: MemoryFolder) -> None:
    """What is there can be completed, by the job that run.json names, or is refused; every row is there once then, and of that job."""
    seed = folder.run["config"]["job"]["seed"] if "run.json" in folder.files else 0
    overrides = [f"job.seed={seed}"]
    try:
        code = run_on(folder, *overrides, make=MakeRows(f"seed {seed}"))
    except UserError as error:
        assert "holds rows of another job" in str(error)  # a run.json that came late, over that of the job
        code = run_on(folder, *overrides, "output.overwrite=true", make=MakeRows(f"seed {seed}"))
    assert code in (0, 3)
    assert folder.rows() == list(range(NUM_ROWS))
    assert set(folder.texts().values()) <= {f"seed {seed}", None}
    assert (folder.run["status"], folder.run["counts"]["rows"]) == ("finished", NUM_ROWS)


@pytest.mark.parametrize("seed", range(24))
def test_every_row_is_there_once_in_the_end(run_on, seed):
    rng, files, late, runs = random.Random(seed), {}, [], []
    folder = MemoryFolder(files)

    def start(number: int) -> Run:
        command = rng.choice(_COMMANDS)
        job_seed = number if "output.overwrite=true" in command else folder.run["config"]["job"]["seed"] if files else 0
        stopped_by = rng.choice([None, signal.SIGTERM])
        most = rng.randrange(NUM_ROWS) if stopped_by else None
        make = MakeRows(f"seed {job_seed}", most=most, stopped_by=stopped_by, heals="output.retry_errors=true" in command)
        return Run(files, rng, late, lambda own: run_on(own, f"job.seed={job_seed}", *command, make=make))

    to_start = rng.randint(2, 4)
    while to_start or any(run.is_alive() for run in runs):
        alive = [run for run in runs if run.is_alive()]
        if to_start and (not alive or rng.random() < 0.05):
            runs.append(start(len(runs)))
            to_start -= 1
            continue
        rng.choice(alive).go_on(killed=rng.random() < 0.02)
        if late and rng.random() < 0.1:
            land(late.pop())
        require_sound(folder)
    while late and rng.random() < 0.5:
        land(late.pop())
    complete(run_on, folder)
    while late:
        land(late.pop())
        complete(run_on, folder)
