"""The input's records, numbered the same way on every run and cut into ranges that the readers take.

`row_index` counts the records of all files in order. The driver goes through the input once: it counts, refuses repeated ids, and keeps
a range per chunk and eight bytes per id, never the records.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from engine.errors import RowError, UserError
from pipeline.columns import ColumnCheck, Columns
from pipeline.files import InputFile, find_files
from pipeline.formats import READERS
from pipeline.records import ROW_SCHEMA, expand_record, read_key
from pipeline.streams import is_compressed
from pipeline.wording import count

_CHUNK_RECORDS = 1024
_CHUNK_BYTES = 4 << 20
_TABLE_ROWS = 128
_TABLE_CHARACTERS = 2 << 20
_SHOW_REPEATS = 5


@dataclass
class Chunk:
    """A run of records of one file, read from `offset` (see `pipeline.formats`), where the number is `start`."""

    file: InputFile
    row_index: int
    start: int
    offset: int
    num_records: int = 0

    def ends_before(self, offset: int) -> bool:
        """Whether the record at `offset` begins another chunk."""
        if self.file.format == "parquet":
            return offset != self.offset
        is_full = self.num_records >= _CHUNK_RECORDS or offset - self.offset >= _CHUNK_BYTES
        return is_full and _has_places(self.file)


@dataclass
class Plan:
    """What is to be read: num_records records make num_rows output rows."""

    files: list[InputFile]
    ignored: list[str]
    chunks: list[Chunk] = field(default_factory=list)
    num_records: int = 0
    num_rows: int = 0

    def describe(self) -> str:
        """What there is to read, with the formats where they are not one."""
        formats = Counter(file.format for file in self.files)
        mixed = f" ({', '.join(f'{times} {name}' for name, times in formats.items())})" if len(formats) > 1 else ""
        return f"{count(self.num_records, 'record')} in {count(len(self.files), 'file')}{mixed}"

    def describe_ignored(self) -> str:
        """What the folders hold besides."""
        names = ", ".join(self.ignored[:3]) + (", ..." if len(self.ignored) > 3 else "")
        return f"{len(self.ignored)}, as no input (another suffix, hidden, or a link to a folder): {names}"


def scan_input(path: str | Sequence[str], format: str, columns: Columns) -> Plan:
    """Goes through the whole input once; a second time only to name repeated ids.

    Raises UserError for a file that cannot be read, an input without records, columns that no record has, and repeated ids.
    """
    files, ignored = find_files(path, format)
    plan = Plan(files=files, ignored=ignored)
    check = ColumnCheck(columns)
    id_hashes = array("Q")
    for file in files:
        names = READERS[file.format].read_columns(file.path)
        if names is not None:
            check.check_file(file.path, names)
    chunk = None
    for file, number, offset, record in _read_files(files, columns.input.limit):
        if chunk is None or chunk.file is not file or chunk.ends_before(offset):
            start, offset = (number, offset) if _has_places(file) else (1, 0)
            chunk = Chunk(file, plan.num_records, start, offset)
            plan.chunks.append(chunk)
        check.look(record)
        id, num_rows = read_key(record, f"{file.name}:{number}", columns)
        id_hashes.append(_hash(id))
        chunk.num_records += 1
        plan.num_records += 1
        plan.num_rows += num_rows
    if not plan.num_records:
        raise UserError(f"input.path '{path}' has no records ({count(len(files), 'file')} read)")
    check.require()
    _refuse_repeated_ids(files, columns, id_hashes)
    return plan


def read_chunk(chunk: Chunk, columns: Columns) -> Iterator[pa.Table]:
    """The chunk's rows, in tables of `ROW_SCHEMA` that are small, whatever the records hold."""
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
    records = READERS[chunk.file.format].read_records(chunk.file.path, offset=chunk.offset, first=chunk.start)
    for index, (number, _, record) in enumerate(itertools.islice(records, chunk.num_records)):
        place = f"{chunk.file.name}:{number}"
        yield from expand_record(record, row_index=chunk.row_index + index, place=place, columns=columns)


def _has_places(file: InputFile) -> bool:
    """Whether a reader can begin in the middle of it."""
    return file.format == "parquet" or not is_compressed(file.path)


def _read_files(files: list[InputFile], limit: int | None) -> Iterator[tuple[InputFile, int, int, dict | RowError]]:
    """The first `limit` records of all files: file, number, offset, record."""
    records = ((file, *found) for file in files for found in READERS[file.format].read_records(file.path))
    return itertools.islice(records, limit)


def _hash(id: str) -> int:
    return int.from_bytes(hashlib.blake2b(id.encode("utf-8"), digest_size=8).digest())


def _refuse_repeated_ids(files: list[InputFile], columns: Columns, id_hashes: array) -> None:
    """Raises UserError with the first few. Equal hashes only say which ids to compare."""
    ordered = np.sort(np.frombuffer(id_hashes, np.uint64))
    suspects = set(ordered[1:][ordered[1:] == ordered[:-1]][: 1 << 16].tolist())
    if not suspects:
        return
    first_places: dict[str, str] = {}
    repeats: list[str] = []
    for file, number, _, record in _read_files(files, columns.input.limit):
        place = f"{file.name}:{number}"
        id, _ = read_key(record, place, columns)
        if id in first_places:
            repeats.append(f"'{id}' ({first_places[id]} and {place})")
        elif _hash(id) in suspects:
            first_places[id] = place
        if len(repeats) == _SHOW_REPEATS:
            break
    if repeats:
        raise UserError(f"repeated ids in column '{columns.input.id}': {'; '.join(repeats)}; set input.id=null to number the rows")
