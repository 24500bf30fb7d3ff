"""Plain text: one prompt per line that is not blank, in the column `prompt`."""

from __future__ import annotations

from collections.abc import Iterator

from engine.errors import RowError
from pipeline.input_file import InputFile
from pipeline.streams import read_lines, with_compressions

SUFFIXES = with_compressions(".txt")

COLUMN = "prompt"


def read_columns(file: InputFile) -> list[str]:
    """The one column."""
    return [COLUMN]


def read_records(file: InputFile, *, offset: int = 0, first: int = 1) -> Iterator[tuple[int, int, dict | RowError]]:
    """(line, byte offset, record); see `pipeline.formats`. Raises UserError as `read_lines` does."""
    for number, place, line in read_lines(file, offset=offset, first=first):
        if isinstance(line, RowError):
            yield number, place, line
            continue
        try:
            prompt = line.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            yield number, place, RowError("bad_record", f"invalid UTF-8: {error.reason} at byte {error.start} of the line")
            continue
        if prompt.strip():
            yield number, place, {COLUMN: prompt}
