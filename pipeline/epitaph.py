"""A word for a process that cannot say one: killed, or ended by Ray's own code, which does so (with exit code 1) when the object store of
its node is gone, as after the system has killed the raylet for its memory."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator

#: waits for a word, and prints the text where the other end closes without one
_SCRIPT = 'read -r word || printf "%s\\n" "$0" >&2'


_PATIENCE_S = 5.0


@contextlib.contextmanager
def epitaph(text: str) -> Iterator[None]:
    """Has `text` on stderr if this process ends inside, in whatever way, where the system has a shell and lets it start."""
    try:
        # a session of its own: a Ctrl-C or a kill of the group is for the job
        waiting = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, text], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )
    except OSError:
        yield
        return
    try:
        yield
    finally:
        try:
            waiting.communicate(b"left\n", timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired:
            waiting.kill()
