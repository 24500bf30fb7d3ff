"""Which rows are there already: one bit per row of the job, whatever the rows hold."""

from __future__ import annotations

import numpy as np


class DoneSet:
    """A set of row numbers below `num_rows` (see `pipeline.row_numbers`); two million rows take a quarter of a megabyte."""

    def __init__(self, num_rows: int):
        self._bits = np.zeros(-(-num_rows // 8), np.uint8)
        self.num_rows = num_rows
        self.count = 0

    def add(self, numbers: np.ndarray) -> np.ndarray:
        """Adds row numbers ([N] int64); returns which of them ([N] bool) were not there, a number that comes twice only once."""
        is_new = np.zeros(len(numbers), bool)
        unique, first = np.unique(numbers, return_index=True)
        is_new[first] = ~self.contains(unique)
        added = numbers[is_new]
        np.bitwise_or.at(self._bits, added >> 3, (1 << (added & 7)).astype(np.uint8))
        self.count += len(added)
        return is_new

    def contains(self, numbers: np.ndarray) -> np.ndarray:
        """[N] int64 -> [N] bool."""
        return (self._bits[numbers >> 3] >> (numbers & 7).astype(np.uint8)) & 1 > 0

    def range(self, first: int, num_rows: int) -> np.ndarray:
        """[num_rows] bool: the rows from number `first` on."""
        skipped = first & 7
        bits = np.unpackbits(self._bits[first >> 3 : (first + num_rows + 7) >> 3], count=skipped + num_rows, bitorder="little")
        return bits[skipped:].view(bool)
