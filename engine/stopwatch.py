"""Where the time of a pass goes, for those who ask: phase by phase, as `Decoder.run` names them.

On a GPU the phases are marked in the stream and read at the end, so that watching adds no wait; each phase then has the time which the
stream spent between its two marks, whether the device or the host was what kept it waiting.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

#: of a pass, in their order
PHASES = ("draft", "verify", "law", "commit")


class TimedPass(Protocol):
    """One target pass with what belongs to it. num_tokens: that the target read in it."""

    num_tokens: int

    def phase(self, name: str) -> AbstractContextManager[None]: ...


class Watch(Protocol):
    """Told of every pass of a decoder. num_rows: that share it. reads_prompt: a row of them reads a part of its prompt."""

    def start_pass(self, *, num_rows: int, reads_prompt: bool) -> TimedPass: ...


class NoWatch:
    """Takes no time."""

    def start_pass(self, *, num_rows: int, reads_prompt: bool) -> TimedPass:
        return _UNTIMED


class Stopwatch:
    """Keeps every pass.

    Args:
        device: of the target.
    """

    def __init__(self, device: torch.device | str):
        self._is_cuda = torch.device(device).type == "cuda"
        self.passes: list[StoppedPass] = []

    def start_pass(self, *, num_rows: int, reads_prompt: bool) -> StoppedPass:
        self.passes.append(StoppedPass(self._is_cuda, num_rows, reads_prompt))
        return self.passes[-1]


class StoppedPass:
    """A pass and its phases."""

    def __init__(self, is_cuda: bool, num_rows: int, reads_prompt: bool):
        self.num_rows, self.reads_prompt = num_rows, reads_prompt
        self.num_tokens = 0
        self._is_cuda = is_cuda
        self._marks: list[tuple[str, Any, Any]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = self._mark()
        yield
        self._marks.append((name, start, self._mark()))

    def seconds(self) -> dict[str, float]:
        """By phase. Waits for the device."""
        found: dict[str, float] = defaultdict(float)
        for name, start, end in self._marks:
            if self._is_cuda:
                end.synchronize()
                found[name] += start.elapsed_time(end) / 1000
            else:
                found[name] += end - start
        return dict(found)

    def _mark(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class BothWatches:
    """Two watches of the same passes."""

    def __init__(self, first: Watch, second: Watch):
        self._watches = first, second

    def start_pass(self, *, num_rows: int, reads_prompt: bool) -> _TimedTwice:
        return _TimedTwice([watch.start_pass(num_rows=num_rows, reads_prompt=reads_prompt) for watch in self._watches])


class _TimedTwice:
    def __init__(self, passes: list[TimedPass]):
        self._passes = passes

    @property
    def num_tokens(self) -> int:
        return self._passes[-1].num_tokens

    @num_tokens.setter
    def num_tokens(self, number: int) -> None:
        for timed in self._passes:
            timed.num_tokens = number

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        first, second = self._passes
        with first.phase(name), second.phase(name):
            yield


class _Untimed:
    num_tokens = 0

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()


_UNTIMED = _Untimed()
