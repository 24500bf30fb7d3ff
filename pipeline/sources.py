"""The input's records, numbered the same way on every run and cut into ranges that the readers take.

`row_index` counts the records of all files in order. The driver goes through the input once: it counts, refuses repeated ids, and keeps
some thousands of ranges, never the records.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from engine.errors import RowError, UserError
from pipeline.columns import ColumnCheck, Columns
from pipeline.done import DoneSet
from pipeline.formats import READERS
from pipeline.input_file import InputFile
from pipeline.records import ROW_SCHEMA, expand_record, read_key
from pipeline.repeated_ids import IdHashes
from pipeline.row_numbers import RowNumbers
from pipeline.streams import is_compressed
from pipeline.wording import count

_CHUNK_RECORDS = 1024
_CHUNK_BYTES = 4 << 20
_CHUNK_ROWS = 1 << 16
_MAX_CHUNKS = 4096
_TABLE_ROWS = 128
_TABLE_CHARACTERS = 2 << 20
_SHOW_REPEATS = 5


@dataclass
class Chunk:
    """A run of records of one file, read from `offset` (see `pipeline.formats`), where the number is `start`.

    row_index: of its first record. first_row: number of its first row (see `pipeline.row_numbers`).
    done: one bit per row, the lowest of a byte first: the rows that are there already; None when none is.
    """

    file: InputFile
    start: int
    offset: int
    row_index: int
    num_records: int
    first_row: int
    num_rows: int
    done: bytes | None = None

    def is_done(self, row: int) -> bool:
        """Whether one of its rows, counted from 0, is there already."""
        return self.done is not None and self.done[row >> 3] >> (row & 7) & 1 > 0


@dataclass
class Plan:
    """What is to be read: num_records records make num_rows output rows."""

    files: list[InputFile]
    chunks: list[Chunk]
    row_numbers: RowNumbers

    @property
    def num_records(self) -> int:
        return self.row_numbers.num_records

    @property
    def num_rows(self) -> int:
        return self.row_numbers.num_rows

    def remaining(self, done: DoneSet) -> list[Chunk]:
        """The chunks that still miss rows, with the bits of those that they need not read."""
        chunks = []
        for chunk in self.chunks:
            is_done = done.range(chunk.first_row, chunk.num_rows)
            if not is_done.all():
                bits = np.packbits(is_done, bitorder="little").tobytes() if is_done.any() else None
                chunks.append(dataclasses.replace(chunk, done=bits))
        return chunks

    def describe(self) -> str:
        """What there is to read, with the formats where they are not one."""
        formats = Counter(file.format for file in self.files)
        mixed = f" ({', '.join(f'{times} {name}' for name, times in formats.items())})" if len(formats) > 1 else ""
        return f"{count(self.num_records, 'record')} in {count(len(self.files), 'file')}{mixed}"


def order_files(files: list[InputFile], earlier_names: Sequence[str]) -> list[InputFile]:
    """The files of an earlier run in their order then, and after them the others as they come: old records keep their numbers."""
    places = {name: place for place, name in enumerate(earlier_names)}
    files = [dataclasses.replace(file, is_old=file.name in places) for file in files]
    return sorted(files, key=lambda file: places.get(file.name, len(places)))


def scan_input(files: list[InputFile], columns: Columns) -> Plan:
    """Goes through the whole input once; to name repeated ids, once more through the chunks that hold them.

    Raises UserError for a file that cannot be read, an input without records, columns that no record has, and repeated ids. A new file of
    a job that has run before must have the columns by itself: its error rows would be there for good.
    """
    check = ColumnCheck(columns)
    has_run = any(file.is_old for file in files)
    for file in files:
        names = READERS[file.format].read_columns(file)
        if names is not None:
            check.check_file(file.path, names)
    cutter = _Cutter()
    with IdHashes() as ids:
        for file in files:
            own_check = ColumnCheck(columns, file.path) if has_run and not file.is_old else check
            most = None if columns.input.limit is None else columns.input.limit - cutter.num_records
            for number, offset, record in itertools.islice(READERS[file.format].read_records(file), most):
                id, num_rows = read_key(record, columns)
                own_check.look(record)
                ids.add(f"{file.name}:{number}" if id is None else id)
                cutter.add(file, number, offset, num_rows)
            if own_check is not check:
                own_check.require()
        plan = Plan(files, *cutter.close())
        if not plan.num_records:
            raise UserError(f"input.path '{columns.input.path}' has no records ({count(len(files), 'file')} read)")
        check.require()
        _refuse_repeated_ids(plan, columns, ids.find_suspects())
    return plan


def read_chunk(chunk: Chunk, columns: Columns) -> Iterator[pa.Table]:
    """The chunk's rows that are not done, in tables of `ROW_SCHEMA` that are small, whatever the records hold.

    The same tables on every call. Raises UserError where the file is not what it was when it was scanned.
    """
    rows: list[dict] = []
    num_characters = 0
    for row in _expand_chunk(chunk, columns):
        rows.append(row)
        num_characters += sum(len(row[name] or "") for name in ("prompt", "messages", "meta"))
        if len(rows) == _TABLE_ROWS or num_characters >= _TABLE_CHARACTERS:
            yield pa.Table.from_pylist(rows, schema=ROW_SCHEMA)
            rows, num_characters = [], 0
    if rows:
        yield pa.Table.from_pylist(rows, schema=ROW_SCHEMA)


def _expand_chunk(chunk: Chunk, columns: Columns) -> Iterator[dict]:
    first = 0  # of the record's rows, in the chunk
    for row_index, number, record in _read_chunk_records(chunk):
        if chunk.done is not None:
            end = first + read_key(record, columns)[1]
            if end <= chunk.num_rows and all(map(chunk.is_done, range(first, end))):
                first = end
                continue
        rows = expand_record(record, row_index=row_index, place=f"{chunk.file.name}:{number}", columns=columns)
        if first + len(rows) > chunk.num_rows:
            raise chunk.file.changed()
        yield from (row for row in rows if not chunk.is_done(first + row["sample"]))
        first += len(rows)
    if first != chunk.num_rows:
        raise chunk.file.changed()


def _read_chunk_records(chunk: Chunk) -> Iterator[tuple[int, int, dict | RowError]]:
    """(row_index, number, record)"""
    records = READERS[chunk.file.format].read_records(chunk.file, offset=chunk.offset, first=chunk.start)
    for index, (number, _, record) in enumerate(itertools.islice(records, chunk.num_records)):
        yield chunk.row_index + index, number, record


class _Cutter:
    """Counts records and rows as they come by, and cuts the records into chunks.

    A long input has larger chunks, not more: when there are too many, neighbours are joined, and those that follow are twice as large.
    """

    def __init__(self):
        self._chunks: list[Chunk] = []
        self._row_numbers = RowNumbers()
        self.num_records = 0
        self._num_rows = 0
        self._samples = 0  # of the last record
        self._scale = 1
        self._max_chunks = _MAX_CHUNKS
        self._file: InputFile | None = None
        self._end_record = self._end_row = self._end_offset = math.inf  # where the chunk ends at the latest

    def add(self, file: InputFile, number: int, offset: int, num_rows: int) -> None:
        if file is not self._file or offset >= self._end_offset or self.num_records >= self._end_record or self._num_rows >= self._end_row:
            self._begin(file, number, offset)
        if num_rows != self._samples:
            self._row_numbers.add_run(self.num_records, num_rows)
            self._samples = num_rows
        self.num_records += 1
        self._num_rows += num_rows

    def close(self) -> tuple[list[Chunk], RowNumbers]:
        self._end()
        self._row_numbers.close(self.num_records)
        return self._chunks, self._row_numbers

    def _begin(self, file: InputFile, number: int, offset: int) -> None:
        self._end()
        self._file = file
        self._end_record = self._end_row = self._end_offset = math.inf
        if file.format == "parquet":
            self._end_offset = offset + self._scale
        elif is_compressed(file.path):  # no cheap way into its middle
            number, offset = 1, 0
        else:
            self._end_record = self.num_records + _CHUNK_RECORDS * self._scale
            self._end_row = self._num_rows + _CHUNK_ROWS * self._scale
            self._end_offset = offset + _CHUNK_BYTES * self._scale
        self._chunks.append(Chunk(file, number, offset, self.num_records, 0, self._num_rows, 0))

    def _end(self) -> None:
        """The last chunk holds all that came since it began."""
        if not self._chunks:
            return
        chunk = self._chunks[-1]
        chunk.num_records = self.num_records - chunk.row_index
        chunk.num_rows = self._num_rows - chunk.first_row
        if len(self._chunks) >= self._max_chunks:
            self._chunks = _join_neighbours(self._chunks)
            self._scale *= 2
            self._max_chunks = max(_MAX_CHUNKS, 2 * len(self._chunks))  # as many files have at least as many chunks


def _join_neighbours(chunks: list[Chunk]) -> list[Chunk]:
    """Two by two, where they are of one file."""
    joined: list[Chunk] = []
    is_joined = True
    for chunk in chunks:
        is_joined = not is_joined and chunk.file is joined[-1].file
        if is_joined:
            joined[-1].num_records += chunk.num_records
            joined[-1].num_rows += chunk.num_rows
        else:
            joined.append(chunk)
    return joined


def _refuse_repeated_ids(plan: Plan, columns: Columns, suspects: list[int]) -> None:
    """Raises UserError with the first few; `suspects`: the records to compare."""
    first_places: dict[str, str] = {}
    repeats: list[str] = []
    for chunk in plan.chunks:
        first, end = (bisect_left(suspects, edge) for edge in (chunk.row_index, chunk.row_index + chunk.num_records))
        wanted = set(suspects[first:end])
        for row_index, number, record in _read_chunk_records(chunk) if wanted else ():
            if row_index not in wanted:
                continue
            place = f"{chunk.file.name}:{number}"
            id = read_key(record, columns)[0] or place
            if id in first_places:
                repeats.append(f"'{id}' ({first_places[id]} and {place})")
            first_places.setdefault(id, place)
            if len(repeats) == _SHOW_REPEATS:
                break
        if len(repeats) == _SHOW_REPEATS:
            break
    if repeats:
        has_run = any(file.is_old for file in plan.files)  # then the option cannot be changed any more
        advice = "allowed: ids that the job does not have yet" if has_run else "set input.id=null to number the rows"
        raise UserError(f"repeated ids in column '{columns.input.id}': {'; '.join(repeats)}; {advice}")
