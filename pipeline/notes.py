"""What a command says while it works, and at its end. A reader that has gone away is no reason to stop a job."""

from __future__ import annotations

import contextlib
import os
import sys


def tell(line: str) -> None:
    """To stderr, now."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def show(text: str) -> None:
    """To stdout. A reader may have enough, as `head` does. Raises OSError for a full disk."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        drop_output()


def drop_output() -> None:
    """What is still buffered for stdout goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
