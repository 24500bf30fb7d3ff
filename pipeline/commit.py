"""Finished rows wait here for others until they make a part, but never long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pyarrow as pa

FLUSH_S = 30.0  # how long a finished row may wait for others before it is written

_FULL = 4  # parts that may wait for the disk before the graph has to


class Committer:
    """Takes tables from one thread and writes parts from another.

    Args:
        write: makes a part of a table.
        rows_per_file: rows of a part; fewer once a row has waited for `flush_s` seconds.
    """

    def __init__(self, write: Callable[[pa.Table], None], rows_per_file: int, flush_s: float = FLUSH_S):
        self._write = write
        self._rows_per_file = rows_per_file
        self._flush_s = flush_s
        self._waiting: list[pa.Table] = []
        self._num_waiting = 0
        self._waiting_since = 0.0
        self._is_closed = False
        self._failure: Exception | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="commit", daemon=True)
        self._thread.start()

    def add(self, table: pa.Table) -> None:
        """Takes finished rows; waits while too many are not written yet. Raises what `write` raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_waiting < _FULL * self._rows_per_file or self._failure or self._is_closed)
            self._raise_failure()
            if self._is_closed:  # a graph that could not be stopped; the next run makes these rows
                return
            if not self._waiting:
                self._waiting_since = time.monotonic()
            self._waiting.append(table)
            self._num_waiting += table.num_rows
            self._changed.notify_all()

    def close(self) -> None:
        """Writes what waits. Raises what `write` raised."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while (table := self._take()) is not None:
                self._write(table)
        except Exception as error:  # handed to the callers of add and close
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _take(self) -> pa.Table | None:
        """The rows of the next part once there are enough, or the first has waited enough; None at the end."""
        with self._changed:
            while not self._is_closed and self._num_waiting < self._rows_per_file:
                left = self._waiting_since + self._flush_s - time.monotonic() if self._waiting else None
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
            if not self._waiting:
                return None
            table = pa.concat_tables(self._waiting)
            part, rest = table.slice(0, self._rows_per_file), table.slice(self._rows_per_file)
            self._waiting, self._num_waiting = [rest] if rest.num_rows else [], rest.num_rows
            self._changed.notify_all()
        return part
