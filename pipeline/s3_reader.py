"""Reads one S3 object in ranges, each no larger than what is read of it makes likely."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import Any, BinaryIO

from engine.errors import UserError
from pipeline.s3 import connect, endpoint, explained

#: A range is at least as large as what is asked for. One that begins where the last ended is twice as large as that.
_LEAST_BYTES = 1 << 18
_MOST_BYTES = 1 << 22
_BUFFER_BYTES = 1 << 16  # of what is handed out at once

_QUOTE = '"'


def version_of(etag: str, size: int) -> str:
    """What tells one content of an object from another. etag: with its quotes or without."""
    return f"etag:{etag.strip(_QUOTE)}:{size}"


def open_object(path: str, options: Mapping[str, Any], version: str) -> BinaryIO:
    """The object as a file. Raises UserError, here and in each read, when it cannot be read or is no longer the one of `version`."""
    with explained(path, options):
        file = connect(options).open(path, "rb", cache_type="none")
        if file.details["type"] != "file":
            raise FileNotFoundError(path)  # and there are keys below it
    found = version_of(file.details["ETag"], file.size)
    if found != version:
        raise UserError(
            f"'{path}' at {endpoint(options)} changed after the input was listed ({version} -> {found}); "
            f"allowed: objects that stay as they are while a job runs"
        )
    return io.BufferedReader(_Ranges(file, path, options), _BUFFER_BYTES)


class _Ranges(io.RawIOBase):
    """Gives what it has, and asks for the next range when that is nothing.

    Args:
        file: of s3fs, without a cache. It asks for the very content that it was opened with.
        path, options: for messages.
    """

    def __init__(self, file: Any, path: str, options: Mapping[str, Any]):
        self._file, self._path, self._options = file, path, options
        self._place, self._ahead = 0, _LEAST_BYTES
        self._window, self._window_start = b"", 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._file.size}[whence]
        return self._place

    def readinto(self, buffer) -> int:
        num_asked = min(len(buffer), self._file.size - self._place)
        if num_asked <= 0:
            return 0
        start = self._place - self._window_start
        if not 0 <= start < len(self._window):
            self._fetch(num_asked)
            start = 0
        piece = self._window[start : start + num_asked]
        buffer[: len(piece)] = piece
        self._place += len(piece)
        return len(piece)

    def close(self) -> None:
        self._window = b""
        self._file.close()
        super().close()

    def _fetch(self, num_asked: int) -> None:
        """Makes the next range, from the present place on, the window."""
        follows = self._place == self._window_start + len(self._window)
        self._ahead = min(2 * self._ahead, _MOST_BYTES) if follows and self._window else _LEAST_BYTES
        num_bytes = min(max(num_asked, self._ahead), self._file.size - self._place)
        with explained(self._path, self._options):
            self._file.seek(self._place)
            window = self._file.read(num_bytes)
        if len(window) != num_bytes:
            raise UserError(f"'{self._path}' at {endpoint(self._options)} gave {len(window)} bytes in place of {num_bytes}")
        self._window, self._window_start = window, self._place
