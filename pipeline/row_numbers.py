"""The number of every output row: 0 to num_rows - 1, in the order of (row_index, sample)."""

from __future__ import annotations

from array import array

import numpy as np

from engine.errors import EngineError


class RowNumbers:
    """Maps keys to row numbers. Keeps 20 bytes per run of records that have equally many rows: next to nothing for most jobs, and 20 bytes
    per record where each has another number than the one before.

    Built in the order of the records: `add_run` where a run begins, `close` at the end.
    """

    def __init__(self):
        self._starts = array("q")  # the run's first record
        self._first_rows = array("q")  # the number of that record's first row
        self._samples = array("i")  # rows of each of its records
        self.num_records = 0
        self.num_rows = 0

    def add_run(self, row_index: int, samples: int) -> None:
        """From record `row_index` on, records have `samples` rows each."""
        self._extend(row_index)
        self._starts.append(row_index)
        self._first_rows.append(self.num_rows)
        self._samples.append(samples)

    def close(self, num_records: int) -> None:
        """There are `num_records` records."""
        self._extend(num_records)

    def __call__(self, row_index: np.ndarray, sample: np.ndarray) -> np.ndarray:
        """The numbers, [N] int64, of the keys row_index, [N] int64, and sample, [N] int32; -1 for a key that is no row of the job."""
        if not self.num_records:
            return np.full(len(row_index), -1, np.int64)
        row_index = row_index.astype(np.int64, copy=False)
        starts, first_rows = np.frombuffer(self._starts, np.int64), np.frombuffer(self._first_rows, np.int64)
        run = np.searchsorted(starts, row_index, side="right") - 1  # -1 below the first record
        samples = np.frombuffer(self._samples, np.int32)[run]
        is_row = (row_index >= 0) & (row_index < self.num_records) & (sample >= 0) & (sample < samples)
        return np.where(is_row, first_rows[run] + (row_index - starts[run]) * samples + sample, -1)

    def require(self, row_index: np.ndarray, sample: np.ndarray, where: str) -> np.ndarray:
        """The numbers of keys that must be rows of the job. Raises EngineError with `where` for one that is not."""
        found = self(row_index, sample)
        if (found < 0).any():
            index = int(np.flatnonzero(found < 0)[0])
            raise EngineError(f"{where} holds row_index {row_index[index]}, sample {sample[index]}, which the job has not")
        return found

    def _extend(self, num_records: int) -> None:
        if self._samples:
            self.num_rows += (num_records - self.num_records) * self._samples[-1]
        self.num_records = num_records
