"""One run of a job, and what it says of itself in run.json: that it has begun, what it is about to write, and how it ended."""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import dataclass, field

from engine.errors import EngineError, UserError
from pipeline import exit_codes, runfile
from pipeline.config import JobConfig
from pipeline.earlier import Earlier, Found, find_parts, find_rows
from pipeline.execute import Outcome
from pipeline.folders import Folder
from pipeline.part_writer import TakenOver
from pipeline.parts import drop_errors, empty_part, list_parts
from pipeline.report import COLUMNS, Summary, summarize
from pipeline.s3 import failures
from pipeline.sources import Plan


@dataclass
class Job:
    """run: its run.json. found: what earlier runs of it left; its rows grow by those that this run adds.

    is_announced: run.json is this run's. outcome: of what it has generated.
    """

    config: JobConfig
    folder: Folder
    earlier: Earlier
    plan: Plan
    run: dict
    found: Found
    is_announced: bool = False
    outcome: Outcome = field(default_factory=lambda: Outcome(None, None))
    started_at: float = field(default_factory=time.time)

    def announce(self) -> None:
        """From here on the output is this run's. Raises TakenOver when it is another's already."""
        self._require_not_replaced()
        runfile.write(self.folder, self.run)
        self.is_announced = True

    def make_ready(self) -> None:
        """Just before the first new part: says what makes it, and drops what it replaces. Until then a run that fails changes no row."""
        self.announce()
        self._drop_overwritten(self.earlier)
        if self.config.output.retry_errors:
            for name in self.found.with_errors:
                drop_errors(self.folder, name)

    def check_output(self) -> Summary:
        """Reads back what is there: footers, schema, keys. Raises EngineError for a row that is twice, or not of the job."""
        summary = Summary()
        if not self.is_announced:  # of a run that overwrites and came to no row
            return summary
        there = find_parts(self.run, list_parts(self.folder))
        find_rows(summary.watch(there.read_own(self.folder, COLUMNS)), self.plan.row_numbers)
        self._drop_overwritten(there)
        summary.take_samples(self.folder)
        return summary

    def close(self, status: str, exit_code: int, summary: Summary | None) -> None:
        """summary: None leaves the counts of an earlier run. Raises TakenOver, and writes nothing, where run.json is a newer run's."""
        run, now, state = self.run, time.time(), self.outcome.state
        run.update(status=status, exit_code=exit_code, counts=run["counts"] if summary is None else summary.counts())
        run["timing"].update(started_at=self.started_at, finished_at=now, total_s=now - self.started_at)
        if state and state["ready_at"]:
            run["timing"].update(load_s=state["ready_at"] - self.started_at, generate_s=state["ended_at"] - state["ready_at"])
            run["engine"] = state["engine"]
        if state:
            run["engines"] = {"starts": state["num_starts"], "deaths": state["num_deaths"], "killed_rows": state["num_condemned"]}
        if self.is_announced:
            self._require_not_replaced()
            runfile.write(self.folder, run)

    def close_failed(self, error: BaseException) -> None:
        """As `close`, of a run that `error` ends."""
        status, code = "failed", 1
        if isinstance(error, KeyboardInterrupt):
            self.outcome = Outcome(signal.SIGINT, self.outcome.state)
            status, code = "interrupted", exit_codes.SIGNAL_BASE + signal.SIGINT
        elif isinstance(error, UserError | EngineError | OSError):
            code = exit_codes.USER_ERROR if isinstance(error, UserError) else exit_codes.ENGINE_FAILURE
        with contextlib.suppress(*failures()):  # of a full disk, perhaps: `error` says more
            summary = None
            if not isinstance(error, KeyboardInterrupt):  # who is in a hurry
                with contextlib.suppress(EngineError):  # perhaps `error` itself
                    summary = summarize(self.folder)
            self.close(status, code, summary)

    def _drop_overwritten(self, there: Earlier) -> None:
        for name in there.dropped:
            self.folder.delete(name)
        for name in there.late:
            empty_part(self.folder, name, self.run["run_id"])

    def _require_not_replaced(self) -> None:
        """Raises TakenOver when run.json is a newer run's. One of an earlier run has come late, and is to be written over."""
        current = runfile.read_run_id(self.folder)
        known = {*self.run["runs"], *self.run["dropped_runs"]}
        if current not in known and (current is not None or self.is_announced):
            found = "is gone" if current is None else f"is another run's now ({current})"
            raise TakenOver(f"'{self.folder.path}/{runfile.NAME}' {found}; this run stops")
