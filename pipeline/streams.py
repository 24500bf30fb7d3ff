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

import pyarrow as pa

from engine.errors import RowError, UserError

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


def read_lines(path: str, *, offset: int = 0, first: int = 1) -> Iterator[tuple[int, int, bytes | RowError]]:
    """(number, offset, line) of every line, blank ones too, each with its line end.

    number: counts from `first`. offset: of the line's first byte in the unpacked text; in a plain file a later call may begin there.
    A compressed file that is cut short or damaged gives its whole lines, and a RowError in place of the next.

    Raises UserError for a file that cannot be read, is not compressed as its name says, or is UTF-16.
    """
    name = _check_first_bytes(path)
    lines = {"gzip": _gzip_lines, "zstd": _zstd_lines}[name](path) if name else _plain_lines(path, offset)
    for number in itertools.count(first):
        try:
            line = next(lines, None)
        except (EOFError, zlib.error, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # of the system, not of what it read
                raise _unreadable(path, error) from None
            what = "cut short" if isinstance(error, EOFError) else "cut short or damaged"
            message = f"the file is {what}: no whole line can be read after byte {offset} of its unpacked text ({name}: {error})"
            yield number, offset, RowError("bad_record", message)
            return
        if line is None:
            return
        if number == 1 and line.startswith(_UTF16_BOMS):
            raise UserError(f"input file '{path}' is UTF-16; allowed: UTF-8 (iconv -f UTF-16 -t UTF-8 converts it)")
        if number == 1 and line.startswith(_BOM):
            offset, line = len(_BOM), line[len(_BOM) :]
        yield number, offset, line
        offset += len(line)


def _check_first_bytes(path: str) -> str | None:
    """How the file is compressed, if it is. Raises UserError where its name and its first bytes differ."""
    try:
        with open(path, "rb") as file:
            start = file.read(4)
    except OSError as error:
        raise _unreadable(path, error) from None
    for suffix, (name, magic) in _COMPRESSIONS.items():
        is_named, is_packed = path.lower().endswith(suffix), magic.match(start) is not None
        if is_named and not is_packed:
            raise UserError(f"input file '{path}' is no {name} file; allowed: {name} data, or a name without '{suffix}'")
        if is_packed and not is_named:
            raise UserError(f"input file '{path}' is a {name} file; allowed: a name that ends in '{suffix}'")
        if is_packed:
            return name
    return None


def _unreadable(path: str, error: OSError) -> UserError:
    return UserError(f"input file '{path}' cannot be read: {error.strerror or error}")


def _plain_lines(path: str, offset: int) -> Iterator[bytes]:
    with open(path, "rb") as file:
        file.seek(offset)
        yield from file


def _gzip_lines(path: str) -> Iterator[bytes]:
    with gzip.open(path, "rb") as file:
        yield from file


def _zstd_lines(path: str) -> Iterator[bytes]:
    begun: list[bytes] = []
    for block in _zstd_blocks(path):
        head, *others = block.split(b"\n")
        begun.append(head)
        for piece in others:
            yield b"".join([*begun, b"\n"])
            begun = [piece]
    if any(begun):
        yield b"".join(begun)


def _zstd_blocks(path: str) -> Iterator[bytes]:
    """The unpacked text, all that there is of it before the error of a damaged file is raised."""
    num_done = 0
    try:
        with open(path, "rb") as file, pa.CompressedInputStream(file, "zstd") as stream:
            while block := stream.read(_BLOCK_BYTES):
                yield block
                num_done += len(block)
        return
    except OSError as error:
        if error.errno is not None:
            raise
    # Arrow drops the block in which an error came: once more, and that block byte by byte
    with _EndInBytes(path) as file, pa.CompressedInputStream(file, "zstd") as stream:
        while num_done and (block := stream.read(min(num_done, _BLOCK_BYTES))):
            num_done -= len(block)
        while byte := stream.read(1):
            yield byte


class _EndInBytes(io.FileIO):
    """Hands out its last bytes one at a time, so that a checksum which is wrong comes after all data, not with it."""

    def read(self, size: int = -1) -> bytes:
        before_checksum = os.fstat(self.fileno()).st_size - _CHECKSUM_BYTES - self.tell()
        return super().read(min(size, before_checksum) if before_checksum > 0 else 1)
