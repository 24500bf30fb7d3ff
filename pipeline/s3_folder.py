"""An output folder in an S3 bucket. A PUT is atomic; `If-None-Match` makes it exclusive."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from engine.errors import UserError
from pipeline.s3 import ANSWER_S, SCHEME, connect, error_code, explain, explained

_AT_ONCE = ("ConditionalRequestConflict", "409")  # another PUT of the same name is on its way
_ATTEMPTS = 5
_WAIT_S = 0.2

#: What a PUT may take, with all its attempts. Timeouts of the connection end when it waits for an answer, not when no byte gets through.
_PUT_S = 240.0
_LEAST_BYTES_PER_S = 1 << 16


class S3Folder:
    """As `pipeline.local_folder.LocalFolder`, below `s3://bucket/prefix`. There is no lock: numbered parts keep writers apart."""

    def __init__(self, path: str, options: Mapping[str, Any]):
        self.path = path.rstrip("/")
        self._options = options
        self._root = self.path.removeprefix(SCHEME)
        self._fs = connect(options)

    def create(self, name: str, data: bytes, answer_s: float = _PUT_S) -> None:
        """Raises FileExistsError, and changes nothing, for a name that is taken."""
        for attempt in range(_ATTEMPTS):
            try:
                self._put(name, data, answer_s, mode="create")
                return
            except OSError as error:
                if error_code(error) not in _AT_ONCE or attempt == _ATTEMPTS - 1:
                    raise
            time.sleep(_WAIT_S)

    def replace(self, name: str, data: bytes) -> None:
        self._put(name, data, _PUT_S)

    def read(self, name: str) -> bytes:
        return self._fs.cat_file(self._at(name))

    def open(self, name: str) -> BinaryIO:
        return self._fs.open(self._at(name), "rb", cache_type="readahead")

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._at(name))

    def names(self, folder: str) -> list[str]:
        """Of the files below a folder, sorted."""
        root = self._at(folder)
        return sorted(f"{folder}/{key.removeprefix(root + '/')}" for key in self._fs.find(root))

    def probe(self) -> None:
        """Writes and deletes an object. Raises UserError when that fails, and for a store that lets it be written over."""
        name = f".probe-{uuid.uuid4().hex[:8]}"
        with explained(f"{self.path}/{name}", self._options):
            self.create(name, b"rheo", ANSWER_S)
            try:
                self.create(name, b"rheo, again", ANSWER_S)
            except FileExistsError:
                return
            finally:
                self.delete(name)
        raise UserError(f"output.path '{self.path}': the store ignores If-None-Match; allowed: one that honours it, as S3 does")

    def explain(self, error: Exception) -> str:
        """What an error of these methods comes to: one of `pipeline.s3.failures`."""
        return f"output.path {explain(error, self.path, self._options)}"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def log_folder(self) -> Iterator[str]:
        """A local folder; it is gone afterwards, unless an error leaves the block, whose message may name a file in it."""
        folder = tempfile.mkdtemp(prefix="rheo-")
        yield folder
        shutil.rmtree(folder, ignore_errors=True)

    def _put(self, name: str, data: bytes, answer_s: float, **options: str) -> None:
        timeout_s = answer_s + len(data) / _LEAST_BYTES_PER_S
        try:
            self._fs.pipe_file(self._at(name), data, timeout=timeout_s, **options)
        except TimeoutError:
            raise TimeoutError(f"the store has not taken it within {timeout_s:.0f} s") from None

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"
