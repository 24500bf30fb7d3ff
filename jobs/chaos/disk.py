"""An output on a disk: what a glob shows, the driver's writes as they happen, and what a kill left of one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.chaos.inotify import CREATED, DELETED, MOVED_TO, Inotify
from jobs.chaos.moments import Trigger

_STAGING = ".staging"
_PART = ".parquet"
_MAX_SHARE_S = 0.2  # a write that took longer says nothing about the next one


class DiskOutput:
    """A folder, empty at first."""

    def __init__(self, path: Path):
        self.path = str(path)
        self.overrides: list[str] = []
        self.num_parts = 0  # written since the last call of `begin_life`
        self._rows = path / "rows"
        self._staging = path / _STAGING
        self._rows.mkdir(parents=True)
        self._armed: tuple[Trigger, Callable[[], None]] | None = None
        self._num_writes = {"part": 0, "run.json": 0}
        self._current: str | None = None  # what is being written
        self._began_at = 0.0
        self._durations = deque([0.01], maxlen=20)
        self._inotify = Inotify()
        self._inotify.watch(self.path)
        self._inotify.watch(str(self._rows))
        self._is_closed = False
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def begin_life(self) -> None:
        self._armed = None
        self.num_parts = 0
        self._num_writes = {"part": 0, "run.json": 0}
        self._current = None

    def arm(self, trigger: Trigger, fire: Callable[[], None]) -> None:
        """Calls `fire` in the middle of a write."""
        self._armed = (trigger, fire)

    def disarm(self) -> None:
        self._armed = None

    def window(self) -> str | None:
        """The write that a dead driver was in the middle of, by what it left; None when it left nothing."""
        if not self._staging.is_dir():
            return None
        for staged in self._staging.iterdir():
            size = staged.stat().st_size
            if staged.name == "run.json":
                return f"run.json {'staged, whole' if _is_json(staged) else f'staged, {size} bytes of it'}"
            final = self._rows / staged.name
            if final.exists() and os.path.samestat(final.stat(), staged.stat()):
                return "part linked, still staged"
            doing = "part to be replaced" if final.exists() else "part"
            return f"{doing} staged, {'whole' if _is_parquet(staged) else f'{size} bytes of it'}, not linked"
        return "staging folder there, and empty"

    def list_parts(self) -> Mapping[str, None]:
        """What a glob shows; the names alone do not say whether a file was replaced."""
        return dict.fromkeys(sorted(str(path.relative_to(self.path)) for path in self._rows.glob("*.parquet")))

    def read_changed(self, name: str, listed: None, known: object) -> tuple[object, bytes | None]:
        """(version, content) of a part, without the content where the version is the known one. Raises FileNotFoundError."""
        with open(f"{self.path}/{name}", "rb") as file:
            found = os.fstat(file.fileno())
            version = (found.st_ino, found.st_size, found.st_mtime_ns)
            return version, None if version == known else file.read()

    def read(self, name: str) -> bytes:
        """Raises FileNotFoundError."""
        return Path(self.path, name).read_bytes()

    def read_run(self) -> dict | None:
        with contextlib.suppress(FileNotFoundError):
            return json.loads(self.read("run.json"))
        return None

    def fill(self, folder: Path) -> None:
        """Takes over what another job has written."""
        shutil.copy(folder / "run.json", self.path)
        shutil.copytree(folder / "rows", self._rows, dirs_exist_ok=True)

    def settle(self) -> list[str]:
        """What came late: nothing does on a disk."""
        return []

    def close(self) -> None:
        self._is_closed = True
        self._thread.join()
        self._inotify.close()

    def _listen(self) -> None:
        while not self._is_closed:
            for event in self._inotify.read(0.2):
                if event.folder == str(self._rows) and event.name.endswith(_PART) and event.mask & (CREATED | MOVED_TO):
                    self.num_parts += 1
                elif event.name == _STAGING and event.mask & CREATED:
                    self._begin_write()
                elif event.folder == str(self._staging) and event.mask & CREATED:
                    self._see(event.name)
                elif event.name == _STAGING and event.mask & DELETED and self._current:
                    self._durations.append(min(time.perf_counter() - self._began_at, _MAX_SHARE_S))

    def _begin_write(self) -> None:
        self._current = None
        with contextlib.suppress(OSError):  # gone already
            self._inotify.watch(str(self._staging))
            for name in os.listdir(self._staging):
                self._see(name)

    def _see(self, name: str) -> None:
        """A file is being written; told by the listing and by its event. There are others: a run writes probes before it begins."""
        what = "part" if name.endswith(_PART) else name
        if self._current is not None or what not in self._num_writes:
            return
        self._current, self._began_at = name, time.perf_counter()
        self._num_writes[what] += 1
        if self._armed is None:
            return
        trigger, fire = self._armed
        if trigger.what == what and trigger.number == self._num_writes[what]:
            self._armed = None
            until = self._began_at + trigger.share * statistics.median(self._durations)
            while time.perf_counter() < until:  # less than a thread can sleep
                pass
            fire()


def _is_parquet(path: Path) -> bool:
    try:
        pq.read_table(path)
    except (pa.ArrowException, OSError):
        return False
    return True


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_bytes())
    except ValueError:
        return False
    return True
