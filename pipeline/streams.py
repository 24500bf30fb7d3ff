"""The lines of a text file, plain or compressed, with their places; and how far a damaged file can be read.

Lines end at `\\n` only: U+2028 and its like are ordinary characters inside a string.
"""

from __future__ import annotations

import gzip
import io
import itertools
import os
import re
import zlib
from collections.abc import Iterator
from typing import BinaryIO

import pyarrow as pa

from engine.errors import RowError, UserError
from pipeline.input_file import InputFile

#: name and first bytes; a zstd file may begin with a frame to be skipped
_COMPRESSIONS = {
    ".gz": ("gzip", re.compile(rb"\x1f\x8b")),
    ".zst": ("zstd", re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18")),
}
_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
_BLOCK_BYTES = 1 << 16
_CHECKSUM_BYTES = 4


def with_compressions(*suffixes: str) -> tuple[str, ...]:
    """Suffixes of file names, and each with those of the compressions."""
    return tuple(suffix + packed for suffix in suffixes for packed in ("", *_COMPRESSIONS))


def is_compressed(path: str) -> bool:
    """By its name. Such a file has no cheap way into its middle."""
    return path.lower().endswith(tuple(_COMPRESSIONS))


def read_lines(file: InputFile, *, offset: int = 0, first: int = 1) -> Iterator[tuple[int, int, bytes | RowError]]:
    """(number, offset, line) of every line, blank ones too, each with its line end.

    number: counts from `first`. offset: of the line's first byte in the unpacked text; in a plain file a later call may begin there.
    A compressed file that is cut short or damaged gives its whole lines, and a RowError in place of the next.

    Raises UserError for a file that cannot be read, is not compressed as its name says, or is UTF-16.
    """
    name = _check_first_bytes(file) if offset == 0 else None  # in the middle of a plain file, which was read from its start before
    lines = {"gzip": _gzip_lines, "zstd": _zstd_lines}[name](file) if name else _plain_lines(file, offset)
    for number in itertools.count(first):
        try:
            line = next(lines, None)
        except (EOFError, zlib.error, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # of the system, not of what it read
                raise _unreadable(file, error) from None
            what = "cut short" if isinstance(error, EOFError) else "cut short or damaged"
            message = f"the file is {what}: no whole line can be read after byte {offset} of its unpacked text ({name}: {error})"
            yield number, offset, RowError("bad_record", message)
            return
        if line is None:
            return
        if number == 1 and line.startswith(_UTF16_BOMS):
            raise UserError(f"input file '{file.path}' is UTF-16; allowed: UTF-8 (iconv -f UTF-16 -t UTF-8 converts it)")
        if number == 1 and line.startswith(_BOM):
            offset, line = len(_BOM), line[len(_BOM) :]
        yield number, offset, line
        offset += len(line)


def _check_first_bytes(file: InputFile) -> str | None:
    """How the file is compressed, if it is. Raises UserError where its name and its first bytes differ."""
    try:
        with file.open() as source:
            start = source.read(4)
    except OSError as error:
        raise _unreadable(file, error) from None
    for suffix, (name, magic) in _COMPRESSIONS.items():
        is_named, is_packed = file.path.lower().endswith(suffix), magic.match(start) is not None
        if is_named and not is_packed:
            raise UserError(f"input file '{file.path}' is no {name} file; allowed: {name} data, or a name without '{suffix}'")
        if is_packed and not is_named:
            raise UserError(f"input file '{file.path}' is a {name} file; allowed: a name that ends in '{suffix}'")
        if is_packed:
            return name
    return None


def _unreadable(file: InputFile, error: OSError) -> UserError:
    return UserError(f"input file '{file.path}' cannot be read: {error.strerror or error}")


def _plain_lines(file: InputFile, offset: int) -> Iterator[bytes]:
    with file.open() as source:
        source.seek(offset)
        yield from source


def _gzip_lines(file: InputFile) -> Iterator[bytes]:
    with file.open() as source, gzip.open(source, "rb") as unpacked:
        yield from unpacked


def _zstd_lines(file: InputFile) -> Iterator[bytes]:
    begun: list[bytes] = []
    for block in _zstd_blocks(file):
        head, *others = block.split(b"\n")
        begun.append(head)
        for piece in others:
            yield b"".join([*begun, b"\n"])
            begun = [piece]
    if any(begun):
        yield b"".join(begun)


def _zstd_blocks(file: InputFile) -> Iterator[bytes]:
    """The unpacked text, all that there is of it before the error of a damaged file is raised."""
    num_done = 0
    try:
        with file.open() as source, pa.CompressedInputStream(source, "zstd") as stream:
            while block := stream.read(_BLOCK_BYTES):
                yield block
                num_done += len(block)
        return
    except OSError as error:
        if error.errno is not None:
            raise
    # Arrow drops the block in which an error came: once more, and that block byte by byte
    with file.open() as source, pa.CompressedInputStream(_EndInBytes(source), "zstd") as stream:
        while num_done and (block := stream.read(min(num_done, _BLOCK_BYTES))):
            num_done -= len(block)
        while byte := stream.read(1):
            yield byte


class _EndInBytes(io.RawIOBase):
    """Hands out the last bytes of a file one at a time, so that a checksum which is wrong comes after all data, not with it."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self._checksum_place = file.seek(0, os.SEEK_END) - _CHECKSUM_BYTES
        file.seek(0)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        before_checksum = self._checksum_place - self._file.tell()
        return self._file.read(min(size, before_checksum) if before_checksum > 0 else 1)
