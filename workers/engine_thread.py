"""One thread that runs an engine, shared by many callers, so that slots refill from one queue. Knows nothing of Ray."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from engine.errors import EngineError
from engine.params import Request, Result

_SPARE = 8  # requests that wait in the engine's own queue, ready for the next free slots


class EngineThread:
    """Feeds requests to an engine and hands each result to whoever asked for it.

    When the engine raises, every open and every later call raises EngineError, and `on_failure` is called once, in this thread.

    Args:
        engine: anything with submit, step, has_work, max_batch, num_queued and num_running.
        on_failure: told the exception that ended the engine.
        on_progress: given the totals so far: at the first row, then at most once in `progress_s`, and whenever the engine falls idle.
    """

    def __init__(
        self,
        engine,
        *,
        on_failure: Callable[[Exception], None] | None = None,
        on_progress: Callable[[dict], None] | None = None,
        progress_s: float = 1.0,
    ):
        self._engine = engine
        self._on_failure = on_failure
        self._on_progress = on_progress
        self._progress_s = progress_s
        self._changed = threading.Condition()  # guards all of the next block
        self._backlog: deque[tuple[Request, Future]] = deque()
        self._open: dict[tuple[str | None, int], Future] = {}  # in the engine
        self._failure: Exception | None = None
        self._is_dropping = False
        self._is_abandoned = False
        self._is_closing = False
        self._totals: Counter = Counter()
        self._told_at = 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def generate(self, requests: Sequence[Request]) -> list[Result | None]:
        """The results in the order of the requests, None for one that was dropped or abandoned; waits for all of them.

        Raises EngineError when the engine failed.
        """
        pairs = [(request, Future()) for request in requests]
        with self._changed:
            if self._failure is not None:
                raise EngineError(f"the engine failed: {self._failure}") from self._failure
            if self._is_dropping:
                return [None] * len(pairs)
            self._backlog.extend(pairs)
            self._changed.notify()
        return [future.result() for _, future in pairs]

    def drop_waiting(self) -> None:
        """From now on no request is begun; those that the engine has already are finished."""
        with self._changed:
            self._is_dropping = True
            while self._backlog:
                self._backlog.popleft()[1].set_result(None)

    def abandon(self) -> None:
        """Every call returns now, with None for what has no result yet, and the engine makes no further step.

        Does not wait for the step that runs: it may never end.
        """
        self.drop_waiting()
        with self._changed:
            self._is_abandoned = True
            while self._open:
                self._open.popitem()[1].set_result(None)
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread once the engine has nothing more to do."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                for result in self._engine.step():
                    self._deliver(result)
                self._tell(now=not self._engine.has_work)
        except Exception as error:  # whatever it is, the callers must not wait for ever
            if self._is_dropping:  # a new engine would do nothing more, and this one's finished rows would be lost for it
                self.abandon()
            else:
                self._fail(error)

    def _wait_for_work(self) -> bool:
        """Gives the engine what it has room for, waiting only when there is nothing to do; False at the end.

        What the engine has no room for stays here, where it can still be dropped.
        """
        engine = self._engine
        with self._changed:
            while not self._is_abandoned:
                while self._backlog and engine.num_running + engine.num_queued < engine.max_batch + _SPARE:
                    self._submit(*self._backlog.popleft())
                if engine.has_work:
                    return True
                if self._open:
                    raise EngineError(f"the engine is idle and {len(self._open)} requests have no result: {list(self._open)[:3]}")
                if self._is_closing:
                    break
                self._changed.wait()
            return False

    def _submit(self, request: Request, future: Future) -> None:
        key = (request.id, request.sample)
        if key in self._open:
            future.set_exception(EngineError(f"request {key} is already running"))
            return
        self._open[key] = future
        self._engine.submit(request)

    def _deliver(self, result: Result) -> None:
        with self._changed:
            if self._is_abandoned:  # in the step that has just ended
                return
            future = self._open.pop((result.id, result.sample))
        cycles = result.cycles or []
        self._totals.update(
            rows=1,
            errors=int(result.error is not None),
            tokens=len(result.token_ids or ()),
            prompt_tokens=result.num_prompt_tokens,
            cycles=len(cycles),
            accepted=sum(cycle.accepted for cycle in cycles),
        )
        future.set_result(result)

    def _tell(self, now: bool) -> None:
        if self._on_progress is None or not self._totals:  # nothing is told before the first row, so that this one is told at once
            return
        if now or time.monotonic() - self._told_at >= self._progress_s:
            self._told_at = time.monotonic()
            self._on_progress(dict(self._totals))

    def _fail(self, error: Exception) -> None:
        if self._on_failure is not None:
            self._on_failure(error)
        with self._changed:
            self._failure = error
            for future in [*self._open.values(), *(future for _, future in self._backlog)]:
                future.set_exception(EngineError(f"the engine failed: {error}"))
            self._open.clear()
            self._backlog.clear()
