"""What an output holds from before: nothing, this very job as far as it came, or something else, which is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.errors import EngineError, UserError
from pipeline import exit_codes, runfile
from pipeline.config import JobConfig
from pipeline.done import DoneSet
from pipeline.fingerprint import find_difference
from pipeline.folders import Folder
from pipeline.parts import Part, list_parts, read_parts
from pipeline.row_numbers import RowNumbers
from pipeline.runfile import job_of

_INSTEAD = "allowed: the job as it was, output.overwrite=true to drop its rows, or another output.path"


@dataclass(frozen=True)
class Earlier:
    """run: its run.json, if there is one to go on with. parts: number -> name, of the job. next_part: a number above all that it ever took.
    dropped: names of the parts that are overwritten. late: of those among `parts` that overwritten runs wrote; known once they are read.
    dropped_runs: ids of these runs.
    """

    run: dict | None
    parts: dict[int, str]
    next_part: int
    dropped: list[str]
    dropped_runs: list[str]
    late: list[str] = field(default_factory=list)

    @property
    def file_names(self) -> list[str]:
        """Of the input, in the order in which its rows are numbered."""
        return [] if self.run is None else [name for name, _ in self.run["fingerprint"].get("input.files", [])]

    @property
    def dtype(self) -> str | None:
        """What `model.dtype` came to."""
        return (self.run or {}).get("engine", {}).get("dtype")

    def require_same(self, fingerprint: Mapping[str, Any], *, grow: bool, whole: bool) -> None:
        """Raises UserError that names what differs between the earlier run and this job, of all that can change rows.

        whole: False while only a part of this job's fingerprint is known.
        """
        if self.run is None:
            return
        before = {name: value for name, value in self.run["fingerprint"].items() if whole or name in fingerprint}
        difference = find_difference(before, fingerprint, grow=grow)
        if difference is not None:
            raise UserError(f"the output holds the rows of another job; it differs in {difference}; {_INSTEAD}")

    def repeated_code(self, config: JobConfig) -> int:
        """The exit code of a finished job that is run again; one that was to grow and has not is no failure."""
        return exit_codes.OK if config.input.grow else self.run["exit_code"]

    def is_finished(self, config: JobConfig, num_files: int) -> bool:
        """Whether nothing is left to do for this job."""
        if self.run is None or self.run["status"] != "finished" or num_files != len(self.file_names):
            return False
        has_errors = self.run["counts"]["status"].get("error", 0) > 0
        is_whole = len(self.parts) == self.run["counts"]["files"] and not self.dropped
        return is_whole and not (config.output.retry_errors and has_errors)

    def read_own(self, folder: Folder, columns: Sequence[str] = ()) -> Iterator[Part]:
        """Reads `parts` (see `read_parts`). Those of overwritten runs count as empty.

        Raises UserError for a part of another job.
        """
        for part in read_parts(folder, self.parts.values(), columns):
            job = job_of(part.run_id)
            if job == job_of(self.run["run_id"]):
                yield part
            elif job in map(job_of, self.dropped_runs):
                self.late.append(part.name)
                yield dataclasses.replace(part, table=part.table.slice(0, 0))
            else:
                raise UserError(f"'{part.name}' holds rows of another job, which run {part.run_id} has made; {_INSTEAD}")


def read_earlier(folder: Folder, config: JobConfig) -> Earlier:
    """Raises UserError for rows that no run.json belongs to, unless they are to be overwritten."""
    parts = list_parts(folder)
    if config.output.overwrite:
        try:
            run = runfile.read(folder)
            dropped_runs = [*run["dropped_runs"], *run["runs"]] if run else []
        except UserError:  # it is broken, or of another rheo, and goes with the rest
            run, dropped_runs = None, list(filter(None, [runfile.read_run_id(folder)]))
        return Earlier(None, {}, _next_part(run, parts), list(parts.values()), dropped_runs)
    run = runfile.read(folder)
    if run is not None:
        return find_parts(run, parts)
    if parts:
        raise UserError(f"'{folder.path}/rows' holds {len(parts)} parts and no {runfile.NAME}; {_INSTEAD}")
    return Earlier(None, {}, 0, [], [])


def find_parts(run: dict, parts: Mapping[int, str]) -> Earlier:
    """The parts of an output, number -> name, seen from a run of its job."""
    first = run["first_part"]
    kept = {number: name for number, name in parts.items() if number >= first}
    dropped = [name for number, name in parts.items() if number < first]
    return Earlier(run, kept, _next_part(run, parts), dropped, run["dropped_runs"])


def _next_part(run: dict | None, parts: Iterable[int]) -> int:
    """Above `first_part` as well: a run that has overwritten all parts may have been killed before it wrote one, and may yet write it."""
    return max([run["first_part"] - 1 if run else -1, *parts]) + 1


@dataclass(frozen=True)
class Found:
    """The rows that are there. with_errors: names of the parts that hold error rows."""

    done: DoneSet
    num_errors: int
    with_errors: list[str]


def find_rows(parts: Iterable[Part], numbers: RowNumbers, *, retry_errors: bool = False) -> Found:
    """What the parts of a job hold. retry_errors: error rows count as not there.

    Raises EngineError for a row that is there twice, or is not of the job.
    """
    done, num_errors, with_errors = DoneSet(numbers.num_rows), 0, []
    for part in parts:
        found = numbers.require(part.row_index, part.sample, f"'{part.name}'")
        is_new = done.add(found[~part.is_error] if retry_errors else found)
        if not is_new.all():
            index = int(np.flatnonzero(~is_new)[0])
            raise EngineError(
                f"'{part.name}' holds row_index {part.row_index[index]}, sample {part.sample[index]}, which is there already: "
                f"this is a bug in rheo"
            )
        if part.is_error.any():
            with_errors.append(part.name)
            num_errors += int(part.is_error.sum())
    return Found(done, num_errors, with_errors)
