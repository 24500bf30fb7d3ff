"""One file of the input, on a disk or in an S3 bucket."""

from __future__ import annotations

import hashlib
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
        version: what the bucket's listing said of the object (see `content_hash`); of a local file empty.
    """

    path: str
    name: str
    format: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    version: str = ""

    def open(self) -> BinaryIO:
        """Its bytes, to be read and sought in. Opening and reading a local file raise OSError.

        With an object both raise UserError, when it cannot be read or is not what it was when it was listed.
        """
        return open_object(self.path, self.storage_options, self.version) if is_s3(self.path) else open(self.path, "rb")

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
