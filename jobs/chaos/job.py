"""One chaos job: a run that is killed and started again at once, until it ends by itself, while somebody looks at its output."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from jobs.chaos.attack import Attack, Hung
from jobs.chaos.inputs import write_input
from jobs.chaos.judge import BrokenPart, compare
from jobs.chaos.modes import Mode
from jobs.chaos.moments import Moment, Moments
from jobs.chaos.processes import Life, end_leftovers
from jobs.chaos.reference import Reference, run_undisturbed
from jobs.chaos.report import Kill, Report
from jobs.chaos.watcher import Watcher
from pipeline.exit_codes import ENGINE_FAILURE, SIGNAL_BASE

SCENARIOS = ("plain", "overwrite", "retry")

_CLOSING = "between the last row and the end"
_ENDED_BY_RAY, _TOLD = 1, "the process was ended before it could close the job"  # see pipeline.epitaph
_DEATH_S = 30.0  # a killed process may have to wait for the disk first
_LONGEST_S = 600.0
_MAX_BAD_ENDS = 4
_NEARLY = 0.8
_SEED_OF_OLD_ROWS = 1
_SHOWN = 2000  # characters of what a driver printed


class ChaosJob:
    """Args:
    folder: for the job's files, not there yet. scenario: of `SCENARIOS`.
    references: what undisturbed runs of the same input made, by name; filled in as they are needed.
    boot_s: how long a start takes, about. max_kills: when the job may end. more_writes: whether more kills are to be in writes.
    scale: of the number of records.
    """

    def __init__(
        self,
        mode: Mode,
        number: int,
        rng: random.Random,
        folder: Path,
        *,
        scenario: str,
        references: dict[str, Reference],
        boot_s: float,
        max_kills: int,
        more_writes: bool,
        scale: float = 1.0,
    ):
        self.report = Report(number, scenario)
        self.boot_s = boot_s
        self._mode = mode
        self._rng = rng
        self._folder = folder
        self._references = references
        self._max_kills = max_kills
        self._more_writes = more_writes
        self._scale = scale
        self._num_bad_ends = 0

    def run(self) -> Report:
        """Raises RuntimeError when an undisturbed run fails."""
        self._folder.mkdir(parents=True)
        self._job = self._folder / "job.yaml"
        self._job.write_text(json.dumps(self._mode.options))  # JSON is YAML
        source = self._folder / "input"
        can_heal = self.report.scenario == "retry" and self._mode.kind == "fake"
        heals_at = time.time() + 2 * self.boot_s + 15 if can_heal else None
        write_input(source, self._mode.kind, broken_until=heals_at, scale=self._scale)
        self._input = self._mode.publish(source)
        with contextlib.closing(self._mode.make_output(self._folder / "out")) as self._output:
            self._prepare(source, heals_at)
            with contextlib.closing(Watcher(self._output)) as self._watcher:
                self._attack = Attack(self._output, self._watcher, len(self._reference.values), self.boot_s)
                is_over = self._live_until_over()
                self.report.late += self._output.settle()
                self._watcher.look()
                if is_over:
                    self._judge()
                self.report.findings += self._watcher.complaints
                self.report.num_looks = self._watcher.num_looks
        self.boot_s = self._attack.boot_s
        end_leftovers(self._attack.seen)
        return self.report

    def _prepare(self, source: Path, heals_at: float | None) -> None:
        """Makes the reference, and what is there before the first life."""
        local = [f"input.path={source}"]
        if self.report.scenario == "retry":
            self._output.begin_life()
            with contextlib.closing(self._start([])) as life:
                life.wait(_LONGEST_S)
        if heals_at is None:
            self._reference = self._share_reference("new", local)
        else:
            time.sleep(max(0.0, heals_at + 1 - time.time()))
            self._reference = run_undisturbed(self._job, self._folder / "reference", local)
        if self.report.scenario == "overwrite":
            self._output.fill(self._share_reference("old", [*local, f"job.seed={_SEED_OF_OLD_ROWS}"]).folder)
        self.boot_s = self._reference.boot_s
        self.report.num_rows = len(self._reference.values)

    def _share_reference(self, name: str, overrides: Sequence[str]) -> Reference:
        if name not in self._references:
            self._references[name] = run_undisturbed(self._job, self._folder.parent / f"reference-{name}", overrides)
        return self._references[name]

    def _live_until_over(self) -> bool:
        """False when the job was given up."""
        last_kill = None
        while self._num_bad_ends < _MAX_BAD_ENDS:
            options = self._draw_options()
            self._mode.before_life()
            self._output.begin_life()
            self.report.num_lives += 1
            with contextlib.closing(self._start(options)) as life:
                if last_kill is not None:
                    self._complete(last_kill)  # only now: nothing may come between a kill and the next start
                try:
                    is_ended, last_kill = self._live(life)
                except Hung as error:
                    self._find(f"life {self.report.num_lives}: {error}")
                    is_ended, last_kill = False, None
            if is_ended and (self.report.scenario != "retry" or options):
                return True
            if is_ended:
                self._check_all_there()
        return False

    def _draw_options(self) -> list[str]:
        """Of the next start. What is there must be overwritten, or its errors made again; a run that has begun to may go on either way."""
        may_end = len(self.report.kills) >= self._max_kills
        if self.report.scenario == "overwrite" and (self._is_old_job() or (not may_end and self._rng.random() < 0.3)):
            return ["output.overwrite=true"]
        if self.report.scenario == "retry" and (may_end or self._rng.random() < 0.8):
            return ["output.retry_errors=true"]
        return []

    def _is_old_job(self) -> bool:
        run = self._output.read_run()
        return run is None or run["config"]["job"]["seed"] == _SEED_OF_OLD_ROWS

    def _start(self, options: list[str]) -> Life:
        # what may differ from run to run does, or a late part would hold the very rows of the one that took its number
        sizes = [f"output.rows_per_file={self._rng.randint(3, 9)}", f"engine.max_batch={self._rng.randint(4, 12)}"]
        overrides = [*self._input, *self._output.overrides, f"output.path={self._output.path}", *sizes, *options]
        command = [*self._mode.command, "run", str(self._job), *overrides]
        return Life(command, self._folder, self._rng, root=self._mode.root, others=self._mode.others)

    def _live(self, life: Life) -> tuple[bool, Kill | None]:
        """One life: (whether it came to the end of the job, the kill that ended it)."""
        moments = Moments(self._rng, self._mode.victims, self._attack.boot_s)
        kills: list[Kill] = []
        while len(self.report.kills) < self._max_kills:
            moment = moments.draw(
                may_kill_engine=not any("MapWorker" in kill.victim or kill.victim == "a node" for kill in kills),
                more_writes=self._more_writes,
                is_nearly_whole=self._watcher.num_rows > _NEARLY * self.report.num_rows,
            )
            kill = self._kill(life, moment)
            if kill is None:
                break
            kills.append(kill)
            if moment.signal != signal.SIGKILL:
                later = moments.after_a_signal()
                kill = later and self._kill(life, dataclasses.replace(later, delay_s=life.age_s + later.delay_s))
                if kill is None:
                    break
            if kill.ends_driver:
                self._await_death(life, kill)
                return False, kill
        return self._judge_end(life, self._attack.await_end(life), kills), None

    def _kill(self, life: Life, moment: Moment) -> Kill | None:
        kill = self._attack.kill_at(life, moment)
        if kill is not None:
            self.report.kills.append(kill)
            if not kill.ends_driver:
                self._complete(kill)
        return kill

    def _await_death(self, life: Life, kill: Kill) -> None:
        life.wait(_DEATH_S)
        kill.window = self._output.window()

    def _complete(self, kill: Kill) -> None:
        self._watcher.look()
        kill.rows, kill.parts = self._watcher.num_rows, self._watcher.num_parts
        run = self._output.read_run()
        kill.status = run and run["status"]
        if kill.window is None and kill.status == "running" and kill.rows == self.report.num_rows and self.report.scenario != "retry":
            kill.window = _CLOSING

    def _judge_end(self, life: Life, code: int, kills: list[Kill]) -> bool:
        """Whether an end was that of the job. Notes one that should not have been."""
        if "Traceback (most recent call last)" in life.stderr:
            self._find(f"life {self.report.num_lives}: a traceback, exit code {code} after {_tell(kills)}: {life.stderr[-_SHOWN:]}")
        if code == self._reference.exit_code:
            return True
        if any(kill.signal == "SIGKILL" for kill in kills) and (code == ENGINE_FAILURE or (code == _ENDED_BY_RAY and _TOLD in life.stderr)):
            return False
        signals = [signal.Signals[kill.signal] for kill in kills if kill.signal != "SIGKILL"]
        if code in {*(SIGNAL_BASE + number for number in signals), *(-number for number in signals)}:  # as a shell sees both
            return False
        self._find(f"life {self.report.num_lives}: exit code {code} after {_tell(kills)}: {life.stderr[-_SHOWN:]}")
        return False

    def _find(self, text: str) -> None:
        self.report.findings.append(text)
        self._num_bad_ends += 1

    def _check_all_there(self) -> None:
        """At an end of the job before its last one: every row is there, whatever it holds."""
        self.report.late += self._output.settle()
        self._watcher.look()
        if self._watcher.num_rows != self.report.num_rows:
            self._find(f"life {self.report.num_lives} ended with {self._watcher.num_rows} of {self.report.num_rows} rows")

    def _judge(self) -> None:
        try:
            self.report.verdict = compare(self._watcher.read_all(), self._reference.values)
        except BrokenPart as error:
            self.report.findings.append(str(error))
            return
        run = self._output.read_run()
        if (run["status"], run["counts"]["rows"]) != ("finished", self.report.num_rows):
            self.report.findings.append(f"run.json says {run['status']}, {run['counts']['rows']} rows")


def _tell(kills: list[Kill]) -> str:
    return "; ".join(f"{kill.signal} to {kill.victim} {kill.moment}" for kill in kills) or "nothing"
