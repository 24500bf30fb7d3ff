"""Where an output is: on a disk or in an S3 bucket, behind the same few methods."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from engine.errors import EngineError
from pipeline.local_folder import LocalFolder
from pipeline.s3 import failures, is_s3
from pipeline.s3_folder import S3Folder

Folder = LocalFolder | S3Folder


def open_folder(path: str, options: Mapping[str, Any] | None = None) -> Folder:
    """options: `output.storage_options`, of an object store. Raises UserError for those that it does not take."""
    return S3Folder(path, options or {}) if is_s3(path) else LocalFolder(path)


@contextlib.contextmanager
def explained_failures(folder: Folder, kind: type[Exception] = EngineError) -> Iterator[None]:
    """Raises `kind` in place of what the disk or the store raises. EngineError: the job can go on once it takes files again."""
    try:
        yield
    except failures() as error:
        raise kind(folder.explain(error)) from None
