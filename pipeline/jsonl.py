"""JSON Lines, plain or gzipped: byte ranges for the readers, one record per line.

Lines end at `\\n` only: U+2028 and its like are ordinary characters inside a string.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from engine.errors import RowError, UserError

SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")

_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")


def scan_lines(path: str) -> Iterator[tuple[int, int, bytes]]:
    """(line number from 1, byte offset in the plain stream, line) of every line that is not blank.

    Raises UserError for a file that is not JSON Lines at all: UTF-16, one JSON array, broken gzip.
    """
    first = True
    offset = 0
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if number == 1 and line.startswith(_UTF16_BOMS):
                raise UserError(f"input file '{path}' is UTF-16; allowed: UTF-8 (iconv -f UTF-16 -t UTF-8 converts it)")
            text = _strip(line, number)
            if text:
                if first and (text == b"[" or text.startswith(b"[{")):
                    raise UserError(f"input file '{path}' is one JSON array; allowed: JSON Lines, one object per line")
                first = False
                yield number, offset, text
            offset += len(line)


def read_lines(path: str, *, offset: int, first_line: int) -> Iterator[tuple[int, bytes]]:
    """(line number, line) of the lines that are not blank, from a byte offset that `scan_lines` gave."""
    with _open(path) as file:
        if offset:
            file.seek(offset)
        for number, line in enumerate(file, start=first_line):
            text = _strip(line, number)
            if text:
                yield number, text


def parse_line(line: bytes) -> dict | RowError:
    """The record of a line, or what is wrong with it."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return RowError("bad_record", f"invalid UTF-8: {error.reason} at byte {error.start} of the line")
    except json.JSONDecodeError as error:
        return RowError("bad_record", f"invalid JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:  # an integer with too many digits; nesting too deep
        return RowError("bad_record", f"invalid JSON: {error}")
    if not isinstance(record, dict):
        return RowError("bad_record", f"the line holds a {type(record).__name__}; allowed: an object")
    return record


def _strip(line: bytes, number: int) -> bytes:
    return (line.removeprefix(_BOM) if number == 1 else line).strip()


@contextmanager
def _open(path: str) -> Iterator[BinaryIO]:
    try:
        with gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb") as file:
            yield file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"input file '{path}' is broken gzip: {error}") from None
    except OSError as error:
        raise UserError(f"input file '{path}' cannot be read: {error.strerror or error}") from None
