"""CSV: commas, double quotes, a first row that names the columns. All values are text, and an empty cell is the empty text.

A record may go over several lines; its number is that of the first.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator

from engine.errors import RowError, UserError
from pipeline.input_file import InputFile
from pipeline.streams import read_lines, with_compressions

SUFFIXES = with_compressions(".csv")

_MAX_FIELD_CHARACTERS = 1 << 26  # what a quote that is never closed may take in before it is given up


def read_columns(file: InputFile) -> list[str] | None:
    """The columns; None for a file without any row. Raises UserError for a first row that is no CSV."""
    return _read_header(file, _Lines(file))


def read_records(file: InputFile, *, offset: int = 0, first: int = 1) -> Iterator[tuple[int, int, dict | RowError]]:
    """(first line, byte offset, record); see `pipeline.formats`. Raises UserError as `read_lines` and `read_columns` do."""
    lines = _Lines(file, offset=offset, first=first)
    columns = read_columns(file) if offset else _read_header(file, lines)
    rows = _parse(lines)
    while True:
        number, place, lines.error = lines.number, lines.offset, None
        try:
            fields = next(rows, None)
        except csv.Error as error:
            if lines.damage is None:
                yield number, place, _explain(error, number, lines)
                continue
            fields = None  # the file stops inside a record
        if fields is None:
            break
        if lines.error is not None:
            yield number, place, lines.error
        elif len(fields) not in (0, len(columns)):
            yield number, place, RowError("bad_record", f"has {len(fields)} fields; allowed: {len(columns)}, as the first row")
        elif fields:  # a blank line has none
            yield number, place, dict(zip(columns, fields, strict=True))
    if lines.damage is not None:
        yield number, place, lines.damage


class _Lines:
    """Hands lines to the parser as text.

    number, offset: of the next line. error: what is wrong with a line handed out since it was last reset. damage: what the file ended in.
    """

    def __init__(self, file: InputFile, *, offset: int = 0, first: int = 1):
        self._lines = read_lines(file, offset=offset, first=first)
        self.number = first
        self.offset = offset
        self.error: RowError | None = None
        self.damage: RowError | None = None
        self.at_end = False

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        number, offset, line = next(self._lines, (self.number, self.offset, None))
        if line is None or isinstance(line, RowError):
            self.damage = line or self.damage
            self.at_end = True
            raise StopIteration
        self.number, self.offset = number + 1, offset + len(line)
        try:
            return line.decode("utf-8")
        except UnicodeDecodeError as error:
            self.error = self.error or RowError("bad_record", f"invalid UTF-8: {error.reason} at byte {error.start} of line {number}")
            return line.decode("utf-8", "replace")  # the parser must see its quotes


def _parse(lines: _Lines) -> Iterator[list[str]]:
    csv.field_size_limit(_MAX_FIELD_CHARACTERS)  # of the whole process; 131072 by default
    return csv.reader(lines, strict=True)


def _read_header(file: InputFile, lines: _Lines) -> list[str] | None:
    try:
        columns = next((fields for fields in _parse(lines) if fields), None)
    except csv.Error as error:
        raise UserError(f"input file '{file.path}' has no readable first row: {error}; allowed: CSV with commas") from None
    problem = lines.error or (lines.damage if columns is None else None)
    if problem is not None:
        raise UserError(f"input file '{file.path}' has no readable first row: {problem.message}")
    other = next((mark for mark in ";\t" if columns and len(columns) == 1 and mark in columns[0]), None)
    if other is not None:
        raise UserError(f"input file '{file.path}' seems to be separated by {other!r}; allowed: CSV with commas")
    if columns and "" in columns:
        raise UserError(
            f"input file '{file.path}': column {columns.index('') + 1} has no name "
            f"(pandas writes its index so; to_csv(index=False) does not)"
        )
    return columns


def _explain(error: csv.Error, first: int, lines: _Lines) -> RowError:
    last = lines.number - 1
    if lines.at_end:
        return RowError("bad_record", f"a quote is opened and never closed: all up to line {last}, the end of the file, is lost in it")
    where = f" in lines {first} to {last}" if last > first else ""
    return RowError("bad_record", f"invalid CSV{where}: {error}")
