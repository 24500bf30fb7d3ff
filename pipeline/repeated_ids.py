"""Which records have the id of an earlier one, found in memory that does not grow with their number.

Ids are kept as 64-bit hashes: a run of them in memory, the runs before it sorted in a temporary file, 12 bytes an id. At the end the
runs are joined range of hashes by range of hashes. Equal hashes only say which records to compare.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from array import array
from collections.abc import Iterator

import numpy as np

from engine.errors import UserError

_RUN_IDS = 1 << 20
_RANGE_BITS = 10  # ranges of hashes by their top bits
_RANGES_PER_RUN = 4  # those that are sorted at once hold about this part of a run's number of ids
_KEEP_PAIRS = 1 << 10

_EDGES = np.arange(-(1 << _RANGE_BITS - 1) + 1, 1 << _RANGE_BITS - 1, dtype=np.int64) << (64 - _RANGE_BITS)


class IdHashes:
    """Takes the ids of all records in order; a context manager, for its file."""

    def __init__(self):
        self._hashes = array("q")
        self._runs: list[tuple[int, int, np.ndarray]] = []  # first record, place in the file, where each range of hashes begins
        self._num_ids = 0
        self._file = None
        self._pairs = np.empty((0, 2), np.int64)  # (earlier, later) records of equal hash, the first few by the later one

    def __enter__(self) -> IdHashes:
        return self

    def __exit__(self, *error) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # of a full disk, which was said: closing would write what is left
                self._file.close()

    def add(self, id: str) -> None:
        """Raises UserError when the temporary folder takes no more."""
        self._hashes.append(hash(id))  # Python's own: another one in each process, and read only in this one
        if len(self._hashes) == _RUN_IDS:
            self._spill()

    def find_suspects(self) -> list[int]:
        """The records whose ids are to be compared, in order: the first thousand that have an earlier one's hash, and the earlier ones."""
        if self._file is None:
            self._sort_run()
        else:
            self._spill()
            for hashes, records in self._read_ranges():
                order = np.argsort(hashes, kind="stable")  # so that equal ones stay in the order of the runs
                self._note_pairs(hashes[order], records[order])
        return np.unique(self._pairs).tolist()

    def _sort_run(self) -> tuple[np.ndarray, np.ndarray]:
        """The distinct hashes in memory, sorted, and the first record of each, counted from the run's first; both [N] int64."""
        hashes = np.frombuffer(self._hashes, np.int64)
        order = np.argsort(hashes, kind="stable")
        hashes = hashes[order]
        self._hashes = array("q")
        is_first = self._note_pairs(hashes, order, self._num_ids)
        self._num_ids += len(hashes)
        return (hashes, order) if is_first.all() else (hashes[is_first], order[is_first])

    def _note_pairs(self, hashes: np.ndarray, records: np.ndarray, first: int = 0) -> np.ndarray:
        """Notes neighbours of equal hash; returns which are not equal to the one before. Both sorted; `records` count from `first`."""
        is_first = np.ones(len(hashes), bool)
        np.not_equal(hashes[1:], hashes[:-1], out=is_first[1:])
        later = np.flatnonzero(~is_first)
        pairs = np.concatenate([self._pairs, np.stack([records[later - 1], records[later]], axis=1) + first])
        self._pairs = pairs[np.argsort(pairs[:, 1], kind="stable")[:_KEEP_PAIRS]]
        return is_first

    def _spill(self) -> None:
        first = self._num_ids
        hashes, records = self._sort_run()
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115, it has no name: gone with the process, whatever ends it
            place = self._file.seek(0, os.SEEK_END)
            self._file.write(hashes)
            self._file.write(records.astype(np.uint32))
            self._file.flush()
        except OSError as error:
            message = f"a temporary file for the ids' hashes, 12 bytes an id, cannot be written: {error.strerror}; TMPDIR names its folder"
            raise UserError(message) from None
        edges = np.searchsorted(hashes, _EDGES).astype(np.int32)
        self._runs.append((first, place, np.concatenate([[0], edges, [len(hashes)]], dtype=np.int32)))

    def _read_ranges(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Hashes and records, both [N] int64, of one range after the other: run by run, each sorted."""
        num_ranges = 1 << _RANGE_BITS
        step = max(1, num_ranges // (_RANGES_PER_RUN * len(self._runs)))
        for begin in range(0, num_ranges, step):
            pieces = [self._read_run(*run, begin, min(begin + step, num_ranges)) for run in self._runs]
            hashes, records = zip(*pieces, strict=True)
            yield np.concatenate(hashes), np.concatenate(records)

    def _read_run(self, first: int, place: int, edges: np.ndarray, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        start, stop, size = int(edges[begin]), int(edges[end]), int(edges[-1])
        hashes = self._read(place + 8 * start, np.int64, stop - start)
        records = self._read(place + 8 * size + 4 * start, np.uint32, stop - start)
        return hashes, records + np.int64(first)

    def _read(self, place: int, dtype: type, count: int) -> np.ndarray:
        self._file.seek(place)
        return np.frombuffer(self._file.read(count * np.dtype(dtype).itemsize), dtype)
