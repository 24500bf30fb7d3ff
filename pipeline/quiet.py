"""Ray's noise out of the way: what it and its children print goes to a file while a job runs."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def divert_noise(path: str) -> Iterator[None]:
    """File descriptor 2 becomes `path` for this process and its children, and so does `sys.stdout`, on which Ray tells of dead workers.

    `sys.stderr` goes on to where it went.
    """
    sys.stderr.flush()
    real = os.dup(2)
    with open(path, "w", encoding="utf-8", errors="replace", buffering=1) as log, contextlib.redirect_stdout(log), _reopen(real):
        os.dup2(log.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(real, 2)
            os.close(real)


@contextlib.contextmanager
def _reopen(descriptor: int) -> Iterator[None]:
    """`sys.stderr` on another descriptor, unless it was replaced already and does not use descriptor 2."""
    if not _writes_to(sys.stderr, 2):
        yield
        return
    encoding = sys.stderr.encoding
    with (
        open(descriptor, "w", buffering=1, encoding=encoding, errors="replace", closefd=False) as stream,
        contextlib.redirect_stderr(stream),
    ):
        yield


def quiet_loggers() -> None:
    """Call it after `ray.data` is imported: the import sets the levels."""
    for name in ("ray", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"ray\.data")


def _writes_to(stream, descriptor: int) -> bool:
    try:
        return stream.fileno() == descriptor
    except (OSError, ValueError):  # no descriptor at all
        return False
