"""JSON Lines: one record per line that is not blank."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from engine.errors import RowError, UserError
from pipeline.input_file import InputFile
from pipeline.streams import read_lines, with_compressions

SUFFIXES = with_compressions(".jsonl", ".ndjson")

#: `json.loads` without its wrappers, which take as long again
_scan = json.JSONDecoder().scan_once

_ARRAY = re.compile(rb"\[\s*(\{|$)")


def read_columns(file: InputFile) -> None:
    """Records name their columns themselves."""


def read_records(file: InputFile, *, offset: int = 0, first: int = 1) -> Iterator[tuple[int, int, dict | RowError]]:
    """(line, byte offset, record); see `pipeline.formats`. Raises UserError as `read_lines` does, and for a file that is one JSON array."""
    at_start = offset == 0
    for number, place, line in read_lines(file, offset=offset, first=first):
        if isinstance(line, RowError):
            yield number, place, line
        elif text := line.strip():
            if at_start and _ARRAY.match(text):
                raise UserError(f"input file '{file.path}' is one JSON array; allowed: JSON Lines, one object per line")
            at_start = False
            yield number, place, _parse(text)


def _parse(line: bytes) -> dict | RowError:
    try:
        text = line.decode("utf-8")
        try:
            record, end = _scan(text, 0)
        except StopIteration:
            end = -1
        if end != len(text):
            record = json.loads(text)  # says what is wrong
    except UnicodeDecodeError as error:
        return RowError("bad_record", f"invalid UTF-8: {error.reason} at byte {error.start} of the line")
    except json.JSONDecodeError as error:
        return RowError("bad_record", f"invalid JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:  # an integer with too many digits; nesting too deep
        return RowError("bad_record", f"invalid JSON: {error}")
    if not isinstance(record, dict):
        return RowError("bad_record", f"the line holds a {type(record).__name__}; allowed: an object")
    return record
