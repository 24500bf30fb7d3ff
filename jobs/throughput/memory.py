"""The most memory that processes have while something runs."""

from __future__ import annotations

import contextlib
import threading

import psutil

_EVERY_S = 0.02


class PeakMemory:
    """Watches from `with` to its end, in a thread. `bytes`: the largest resident size; memory that processes share counts in each.

    Args:
        pid: of the process. children: those that it has started, and theirs, count too.
    """

    def __init__(self, pid: int, *, children: bool):
        self.bytes = 0
        self._process, self._children = psutil.Process(pid), children
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self._look()

    def _look(self) -> None:
        total = 0
        with contextlib.suppress(psutil.Error):  # one that has ended
            processes = [self._process, *(self._process.children(recursive=True) if self._children else ())]
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    total += process.memory_info().rss
        self.bytes = max(self.bytes, total)
