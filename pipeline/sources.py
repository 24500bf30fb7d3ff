"""The input: which files in which order, numbered the same way on every run, cut into ranges that the readers take.

`row_index` counts the records of all files in sorted order. The driver goes through the input once: it counts, refuses repeated ids,
and keeps a range per chunk and a digest per id, never the records.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pyarrow as pa

from engine.errors import RowError, UserError, unknown_name
from pipeline import jsonl, parquet
from pipeline.config import InputSection
from pipeline.records import ROW_SCHEMA, Columns, expand_record, has_column, read_key

_READERS = {"jsonl": jsonl, "parquet": parquet}
_CHUNK_RECORDS = 1024
_CHUNK_BYTES = 4 << 20
_TABLE_RECORDS = 128


@dataclass(frozen=True)
class InputFile:
    """name: the path relative to the input root, which ids and messages use."""

    path: str
    name: str
    format: str


@dataclass(frozen=True)
class Chunk:
    """A run of records of one file. start: the first record's line (JSON Lines) or row (Parquet), from 1."""

    file: InputFile
    row_index: int
    num_records: int
    start: int
    offset: int = 0
    group: int = 0


@dataclass
class Plan:
    """What is to be read: num_records records make num_rows output rows."""

    files: list[InputFile]
    ignored: list[str]
    chunks: list[Chunk] = field(default_factory=list)
    num_records: int = 0
    num_rows: int = 0


def find_files(path: str, format: str) -> tuple[list[InputFile], list[str]]:
    """The files of `input.path` in sorted order, and those in the folder that are no input.

    Raises UserError when there is none.
    """
    suffixes = itertools.chain.from_iterable(reader.SUFFIXES for reader in _READERS.values())
    if format != "auto":
        suffixes = _READERS[format].SUFFIXES
    suffixes = tuple(suffixes)
    if os.path.isfile(path):
        found, root = [path], os.path.dirname(path)
    elif os.path.isdir(path):
        found = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
        root = path
    else:
        found = [name for name in glob.glob(path, recursive=True) if os.path.isfile(name)]
        root = _fixed_folder(path)
        if not found:
            raise UserError(f"input.path '{path}' matches no file; allowed: a file, a folder or a glob that exists")
    files, ignored = [], []
    for name in sorted(found):
        relative = os.path.relpath(name, root or ".")
        kind = _format_of(name, format, explicit=not os.path.isdir(path))
        is_hidden = any(part.startswith((".", "_")) for part in relative.split(os.sep))
        if kind is None or (is_hidden and found != [path]):
            ignored.append(relative)
        else:
            shown = os.fsencode(relative.replace(os.sep, "/")).decode("utf-8", "replace")
            files.append(InputFile(path=name, name=shown, format=kind))
    if not files:
        unbuilt = " (csv and text are not built yet)" if any(name.endswith((".csv", ".txt")) for name in ignored) else ""
        seen = f"; found: {', '.join(ignored[:5])}{unbuilt}" if ignored else ""
        raise UserError(
            f"input.path '{path}' holds no input file; allowed: names that end in {', '.join(suffixes)}, or a file or glob with "
            f"input.format={' or '.join(_READERS)}{seen}"
        )
    return files, ignored


def scan_input(path: str, format: str, columns: Columns) -> Plan:
    """Goes through the whole input once.

    Raises UserError for a file that cannot be read, an input without records, columns that no record has, and repeated ids.
    """
    files, ignored = find_files(path, format)
    plan = Plan(files=files, ignored=ignored)
    seen: dict[bytes, tuple[int, int]] = {}
    repeats: list[str] = []
    spotted = _ColumnCheck(columns)
    limit = columns.input.limit
    for index, file in enumerate(files):
        for chunk, records in _scan_file(file, columns):
            room = None if limit is None else limit - plan.num_records
            num_records = 0
            for number, record in itertools.islice(records, room):
                if file.format != "parquet":  # whose columns are known, and not read here
                    spotted.look(record)
                place = f"{file.name}:{number}"
                id, num_rows = read_key(record, place, columns)
                plan.num_rows += num_rows
                num_records += 1
                digest = hashlib.blake2b(id.encode("utf-8"), digest_size=16).digest()
                first_index, first_number = seen.setdefault(digest, (index, number))
                if (first_index, first_number) != (index, number) and len(repeats) < 5:
                    repeats.append(f"'{id}' ({files[first_index].name}:{first_number} and {place})")
            if num_records:
                plan.chunks.append(replace(chunk, row_index=plan.num_records, num_records=num_records))
                plan.num_records += num_records
    if not plan.num_records:
        raise UserError(f"input.path '{path}' has no records ({len(files)} file{'s' if len(files) > 1 else ''} read)")
    spotted.require()
    if repeats:
        raise UserError(f"repeated ids in column '{columns.input.id}': {'; '.join(repeats)}; set input.id=null to number the rows")
    return plan


def read_chunk(chunk: Chunk, columns: Columns) -> Iterator[pa.Table]:
    """The chunk's rows, in tables of `ROW_SCHEMA`."""
    records = itertools.islice(_read_records(chunk), chunk.num_records)
    numbered = enumerate(records, start=chunk.row_index)
    while batch := list(itertools.islice(numbered, _TABLE_RECORDS)):
        rows: list[dict] = []
        for row_index, (number, record) in batch:
            rows += expand_record(record, row_index=row_index, place=f"{chunk.file.name}:{number}", columns=columns)
        yield pa.Table.from_pylist(rows, schema=ROW_SCHEMA)


def _scan_file(file: InputFile, columns: Columns) -> Iterator[tuple[Chunk, Iterator[tuple[int, dict | RowError]]]]:
    """Each chunk of a file with its numbered records; of Parquet only the columns that the scan needs."""
    if file.format == "parquet":
        names, sizes = parquet.read_layout(file.path)
        _require_columns(file, names, columns)
        wanted = {name for path in (columns.input.id, columns.input.params) if path for name in (path, path.split(".")[0])}
        start = 1
        for group, size in enumerate(sizes):
            rows = parquet.read_rows(file.path, group=group, columns=sorted(wanted.intersection(names)))
            yield Chunk(file, 0, size, start, group=group), enumerate(rows, start=start)
            start += size
        return
    lines = jsonl.scan_lines(file.path)
    whole = file.path.endswith(".gz")  # a gzip stream has no cheap way into its middle
    while (first := next(lines, None)) is not None:
        taken = itertools.chain([first], lines) if whole else _take_chunk(first, lines)
        records = ((number, jsonl.parse_line(line)) for number, _, line in taken)
        number, offset, _ = first
        yield (Chunk(file, 0, 0, 1) if whole else Chunk(file, 0, 0, number, offset=offset)), records
        for _ in records:  # the caller stopped early, at input.limit: nothing more is wanted
            return


def _take_chunk(first: tuple[int, int, bytes], lines: Iterator[tuple[int, int, bytes]]) -> Iterator[tuple[int, int, bytes]]:
    line, num_bytes, count = first, 0, 0
    while line is not None:
        yield line
        num_bytes += len(line[2])
        count += 1
        if count == _CHUNK_RECORDS or num_bytes >= _CHUNK_BYTES:
            return
        line = next(lines, None)


def _read_records(chunk: Chunk) -> Iterator[tuple[int, dict | RowError]]:
    if chunk.file.format == "parquet":
        return enumerate(parquet.read_rows(chunk.file.path, group=chunk.group), start=chunk.start)
    lines = jsonl.read_lines(chunk.file.path, offset=chunk.offset, first_line=chunk.start)
    return ((number, jsonl.parse_line(line)) for number, line in lines)


def _require_columns(file: InputFile, names: list[str], columns: Columns) -> None:
    def is_there(path: str) -> bool:
        return path in names or path.split(".")[0] in names

    for option, path in _named_columns(columns.input).items():
        if path and not is_there(path):
            raise UserError(f"{option}: input file '{file.path}': {unknown_name('column', path, names)}")
    wanted = [path for path in (columns.input.prompt, columns.input.messages) if path]
    if not any(is_there(path) for path in wanted):
        raise UserError(f"input file '{file.path}': {unknown_name('column', wanted[0], names)}; set input.prompt or input.messages")


class _ColumnCheck:
    """Whether any record at all has a column: one that none has is a wrong name, not so many broken rows."""

    def __init__(self, columns: Columns):
        section = columns.input
        self._wanted = [path for path in (section.prompt, section.messages) if path]
        self._missing = {option: path for option, path in _named_columns(section).items() if path}
        self._keys: list[str] = []
        self._has_prompt = False

    def look(self, record: dict | RowError) -> None:
        if isinstance(record, RowError) or (self._has_prompt and not self._missing):
            return
        self._keys = self._keys or list(record)
        self._has_prompt = self._has_prompt or any(has_column(record, path) for path in self._wanted)
        self._missing = {option: path for option, path in self._missing.items() if not has_column(record, path)}

    def require(self) -> None:
        """Raises UserError with the nearest key of the first record."""
        if not self._keys:  # no record could be read: each becomes an error row
            return
        for option, path in self._missing.items():
            raise UserError(f"{option}: no record has it: {unknown_name('column', path, self._keys)}")
        if not self._has_prompt:
            raise UserError(f"{unknown_name('column', self._wanted[0], self._keys)} in every record; set input.prompt or input.messages")


def _named_columns(section: InputSection) -> dict[str, str | None]:
    """The column options that were given: their columns must be there, which the defaults need not."""
    named = {}
    for name in ("prompt", "messages", "id", "params"):
        path = getattr(section, name)
        if path != getattr(InputSection, name):
            named[f"input.{name}"] = path
    return named


def _format_of(path: str, format: str, *, explicit: bool) -> str | None:
    for name, reader in _READERS.items():
        if path.endswith(reader.SUFFIXES) and format in ("auto", name):
            return name
    return format if explicit and format != "auto" else None


def _fixed_folder(pattern: str) -> str:
    """The folder before the first part of a glob that has a wildcard: `data/*/a.jsonl` -> `data`."""
    parts = []
    for part in os.path.dirname(pattern).split(os.sep):
        if glob.has_magic(part):
            break
        parts.append(part)
    return os.sep.join(parts) or (os.sep if pattern.startswith(os.sep) else "")
