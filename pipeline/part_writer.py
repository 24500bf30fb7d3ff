"""Rows -> parts, and no row twice whoever else still writes.

Exactly once rests on three things only. A part is created where there is none, or not at all (`Folder.create`). Part k is created by a
writer that knows the keys of all parts below k: a writer that finds number k taken reads that part, drops the rows it holds from its
own, and goes on with k + 1. And number k stays taken. So the keys of any part are in none below it, and a writer left over from a killed
run can add rows that were missing, but none that are there.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from engine.errors import EngineError
from pipeline.done import DoneSet
from pipeline.folders import Folder
from pipeline.parts import empty_part, encode_part, part_name, read_part
from pipeline.row_numbers import RowNumbers
from pipeline.runfile import job_of


class TakenOver(EngineError):
    """A newer run writes into this output."""


class PartWriter:
    """Args:
    folder: the output.
    run_id: of this run.
    earlier_runs: ids of the runs that this one resumes: their rows count. dropped_runs: of those whose jobs are overwritten: theirs go.
    row_numbers: of the job.
    done: the rows in the parts below `next_part`; what is written is added to it.
    before_first: called once, just before the first part is created.
    """

    def __init__(
        self,
        folder: Folder,
        *,
        run_id: str,
        earlier_runs: set[str],
        dropped_runs: set[str],
        row_numbers: RowNumbers,
        done: DoneSet,
        next_part: int,
        before_first: Callable[[], None],
    ):
        self._folder = folder
        self._run_id = run_id
        self._earlier_runs = earlier_runs | {run_id}
        self._dropped_jobs = set(map(job_of, dropped_runs))
        self._row_numbers = row_numbers
        self._done = done
        self._next_part = next_part
        self._before_first = before_first
        self._is_first = True

    def write(self, table: pa.Table) -> None:
        """Creates a part of those rows of a table of `SCHEMA` that are not there yet.

        Raises TakenOver when a newer run writes here, EngineError for a folder that cannot be written.
        """
        if self._is_first:
            self._before_first()
            self._is_first = False
        while (table := self._without_done(table)).num_rows:
            name = part_name(self._next_part)
            self._next_part += 1
            try:
                self._folder.create(name, encode_part(table, self._run_id))
            except FileExistsError:
                self._yield_to(name)
            except OSError as error:
                raise EngineError(f"'{self._folder.path}/{name}' cannot be written: {error}") from None
            else:
                self._done.add(self._numbers(table))

    def _without_done(self, table: pa.Table) -> pa.Table:
        numbers = self._numbers(table)
        is_new = np.zeros(len(numbers), bool)
        is_new[np.unique(numbers, return_index=True)[1]] = True  # Ray may have brought a table twice
        is_new &= ~self._done.contains(numbers)
        return table if is_new.all() else table.filter(pa.array(is_new))

    def _numbers(self, table: pa.Table) -> np.ndarray:
        return self._row_numbers.require(table["row_index"].to_numpy(), table["sample"].to_numpy(), "a result")

    def _yield_to(self, name: str) -> None:
        """The part that was to be written is there already."""
        part = read_part(self._folder, name)
        if job_of(part.run_id) in self._dropped_jobs:  # come late
            empty_part(self._folder, name, self._run_id)
        elif part.run_id in self._earlier_runs:  # of a writer that was killed, come late; or this run's own, whose answer was lost
            self._done.add(self._row_numbers.require(part.row_index, part.sample, f"'{name}'"))
        else:
            raise TakenOver(f"another run ({part.run_id}) writes into '{self._folder.path}'; this one stops, its rows so far stay")
