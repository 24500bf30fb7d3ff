"""Linux's inotify: what happens in a folder, the moment it does."""

from __future__ import annotations

import ctypes
import os
import select
import struct
from typing import NamedTuple

MOVED_TO, CREATED, DELETED = 0x80, 0x100, 0x200  # from <sys/inotify.h>

_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name
_libc = ctypes.CDLL(None, use_errno=True)


class Event(NamedTuple):
    folder: str
    name: str
    mask: int


class Inotify:
    """Watches folders, not what is below them."""

    def __init__(self):
        self._descriptor = _checked(_libc.inotify_init1(os.O_CLOEXEC))
        self._folders: dict[int, str] = {}

    def watch(self, folder: str) -> None:
        watch = _checked(_libc.inotify_add_watch(self._descriptor, os.fsencode(folder), MOVED_TO | CREATED | DELETED))
        self._folders[watch] = folder

    def read(self, timeout_s: float) -> list[Event]:
        """The events since the last call, as soon as there is one; none after the time."""
        if not select.select([self._descriptor], [], [], timeout_s)[0]:
            return []
        data = os.read(self._descriptor, 1 << 16)
        events, place = [], 0
        while place < len(data):
            watch, mask, _, length = _EVENT.unpack_from(data, place)
            name = data[place + _EVENT.size :][:length].rstrip(b"\0")
            place += _EVENT.size + length
            if watch in self._folders:
                events.append(Event(self._folders[watch], os.fsdecode(name), mask))
        return events

    def close(self) -> None:
        os.close(self._descriptor)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
