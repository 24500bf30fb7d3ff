"""What an output holds from before: nothing, this very job as far as it came, or something else, which is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.errors import EngineError, UserError
from pipeline import runfile
from pipeline.config import JobConfig
from pipeline.done import DoneSet
from pipeline.fingerprint import find_difference
from pipeline.folders import Folder
from pipeline.parts import Part, list_parts
from pipeline.row_numbers import RowNumbers

_INSTEAD = "allowed: the job as it was, output.overwrite=true to drop its rows, or another output.path"


@dataclass(frozen=True)
class Earlier:
    """run: its run.json, if there is one. parts: number -> name, of the job's rows. dropped: of rows that were to be overwritten."""

    run: dict | None
    parts: dict[int, str]
    dropped: dict[int, str]

    @property
    def next_part(self) -> int:
        return max([*self.parts, *self.dropped], default=-1) + 1

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

    def is_finished(self, config: JobConfig, num_files: int) -> bool:
        """Whether nothing is left to do for this job."""
        if self.run is None or self.run["status"] != "finished" or num_files != len(self.file_names):
            return False
        has_errors = self.run["counts"]["status"].get("error", 0) > 0
        is_whole = len(self.parts) == self.run["counts"]["files"]
        return is_whole and not (config.output.retry_errors and has_errors)


def read_earlier(folder: Folder, config: JobConfig) -> Earlier:
    """Raises UserError for rows that no run.json belongs to, unless they are to be overwritten."""
    parts = list_parts(folder)
    run = runfile.read(folder)
    if config.output.overwrite:
        return Earlier(None, {}, parts)
    if run is None:
        if parts:
            raise UserError(f"'{folder.path}/rows' holds {len(parts)} parts and no {runfile.NAME}; {_INSTEAD}")
        return Earlier(None, {}, {})
    first = run["first_part"]
    kept = {number: name for number, name in parts.items() if number >= first}
    return Earlier(run, kept, {number: name for number, name in parts.items() if number < first})


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
