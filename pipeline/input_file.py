"""One file of the input, on a disk or in an S3 bucket."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from engine.errors import UserError
from pipeline.s3 import is_s3
from pipeline.s3_reader import open_object


@dataclass(frozen=True)
class InputFile:
    """It is sent to the processes that read it, and each opens it for itself: there are options in it, and no credentials.

    Args:
        path: on a disk, or `s3://bucket/key`.
        name: the path relative to the input root, which ids and messages use.
        storage_options: of `pipeline.s3.connect`.
        version: what the listing said of it, to tell one content from another: of a local file `local_version`, of an object its
            `content_hash`. Empty: unknown.
        is_old: an earlier run of the job had it already.
    """

    path: str
    name: str
    format: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    version: str = ""
    is_old: bool = field(default=False, compare=False)

    def open(self) -> BinaryIO:
        """Its bytes, to be read and sought in. Opening and reading a local file raise OSError.

        Raises UserError for a file that is not what it was when it was listed; with an object, reading does too, and for one that cannot
        be read.
        """
        if is_s3(self.path):
            return open_object(self.path, self.storage_options, self.version)
        if self.version and self.version != local_version(os.stat(self.path)):
            raise self.changed()
        return open(self.path, "rb")

    def changed(self) -> UserError:
        """What to raise for a file that is not what it was."""
        return UserError(f"input file '{self.path}' has changed since this run began; allowed: input that stays as it is")

    def content_hash(self) -> str:
        """Changes with the content: `sha256:...` of a local file's bytes, and `etag:...:size` of an object, which costs nothing.

        An object's also changes when the same bytes are uploaded again in other parts, or under another encryption key.

        Raises UserError for a file that cannot be read.
        """
        if is_s3(self.path):
            return self.version
        try:
            with self.open() as file:
                return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        except OSError as error:
            raise UserError(f"input file '{self.path}' cannot be read: {error.strerror or error}") from None


def local_version(status: os.stat_result) -> str:
    """What tells one content of a file from another, without reading it: a change that keeps its size still sets its time."""
    return f"{status.st_size}:{status.st_mtime_ns}"
