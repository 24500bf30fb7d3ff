"""`input.max_errors`: a job whose input is plainly wrong is stopped, and what it has so far stays."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

_LEAST_ROWS = 100  # of a share: the first rows of a job say little


class ErrorLimit:
    """Counts rows as they come.

    Args:
        limit: more error rows than these are too many; a number below 1 is a share of the rows so far, of a hundred at least. None: none.
        num_rows, num_errors: of earlier runs of the job.
    """

    def __init__(self, limit: float | None, *, num_rows: int = 0, num_errors: int = 0):
        self._limit = limit
        self._num_rows = num_rows
        self._num_errors = num_errors

    def add(self, table: pa.Table) -> None:
        self._num_rows += table.num_rows
        self._num_errors += pc.sum(pc.equal(table["status"], "error")).as_py() or 0

    @property
    def is_exceeded(self) -> bool:
        if self._limit is None:
            return False
        most = self._limit * max(self._num_rows, _LEAST_ROWS) if 0 < self._limit < 1 else self._limit
        return self._num_errors > most

    def describe(self) -> str:
        return f"{self._num_errors} of {self._num_rows} rows failed; input.max_errors={self._limit}"
