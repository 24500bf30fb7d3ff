"""An output folder on a disk. Files appear whole and durable, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from typing import BinaryIO

from filelock import FileLock, Timeout

from engine.errors import UserError

_STAGING = ".staging"
_LOCK = ".lock"
_FILES = (_LOCK, "run.json", "ray.log")

#: of a file system without hard links
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK, errno.EINVAL)


class LocalFolder:
    """Names are relative to `path`, with slashes. Methods raise OSError where they say nothing else."""

    def __init__(self, path: str):
        self.path = path

    def create(self, name: str, data: bytes) -> None:
        """Raises FileExistsError, and changes nothing, for a name that is taken."""
        with self._stage(name, data) as staged:
            final = self._at(name)
            try:
                os.link(staged, final)  # unlike a rename it never replaces
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                if os.path.exists(final):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), final) from None
                os.rename(staged, final)  # the lock keeps other writers out
            _sync_folder(os.path.dirname(final))

    def replace(self, name: str, data: bytes) -> None:
        with self._stage(name, data) as staged:
            os.replace(staged, self._at(name))
            _sync_folder(os.path.dirname(self._at(name)))

    def read(self, name: str) -> bytes:
        with self.open(name) as file:
            return file.read()

    def open(self, name: str) -> BinaryIO:
        return open(self._at(name), "rb")

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._at(name))

    def names(self, folder: str) -> list[str]:
        """Of the files in a folder below, sorted; none where there is no such folder."""
        try:
            return sorted(f"{folder}/{entry.name}" for entry in os.scandir(self._at(folder)) if entry.is_file())
        except FileNotFoundError:
            return []

    def probe(self) -> None:
        """Writes and deletes a file in each folder that is to be written. Raises UserError when that fails; leaves nothing behind."""
        made = self._make()
        try:
            for folder in filter(os.path.lexists, (self.path, self._at("rows"), self._at(_STAGING))):
                probe = os.path.join(folder, f".probe-{uuid.uuid4().hex[:8]}")
                with open(probe, "wb") as file:
                    file.write(b"rheo")
                os.unlink(probe)
            for path in filter(os.path.lexists, map(self._at, _FILES)):
                with open(path, "ab"):
                    pass
        except OSError as error:
            raise UserError(f"output.path '{self.path}' cannot be written: {error.strerror}: '{error.filename}'") from None
        finally:
            for folder in made:
                os.rmdir(folder)

    def explain(self, error: Exception) -> str:
        """What an error of these methods comes to."""
        return f"output.path '{self.path}' cannot be used: {error}"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Makes the folder and keeps other runs out of it. Raises UserError when one is in it."""
        os.makedirs(self.path, exist_ok=True)
        try:
            with FileLock(self._at(_LOCK), timeout=0):
                shutil.rmtree(self._at(_STAGING), ignore_errors=True)  # of a run that was killed
                yield
        except Timeout:
            raise UserError(f"output.path '{self.path}' is in use by another run; wait for it, or give another path") from None

    @contextlib.contextmanager
    def log_folder(self) -> Iterator[str]:
        """Where a file can grow that is no result."""
        yield self.path

    def _at(self, name: str) -> str:
        return os.path.join(self.path, name)

    @contextlib.contextmanager
    def _stage(self, name: str, data: bytes) -> Iterator[str]:
        staging = self._at(_STAGING)
        for folder in (staging, os.path.dirname(self._at(name))):
            os.makedirs(folder, exist_ok=True)
        staged = os.path.join(staging, os.path.basename(name))
        try:
            with open(staged, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield staged
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(staged)
            with contextlib.suppress(OSError):
                os.rmdir(staging)

    def _make(self) -> list[str]:
        """Makes the folder with its parents; returns those that were not there, innermost first."""
        missing = []
        folder = os.path.abspath(self.path)
        while not os.path.exists(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        try:
            os.makedirs(self.path, exist_ok=True)
        except OSError as error:
            raise UserError(f"output.path '{self.path}' cannot be made: {error.strerror}") from None
        return missing


def _sync_folder(path: str) -> None:
    """Makes an entry durable: it lives in the folder, not in the file."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
