"""One thread that runs an engine, shared by many callers, so that slots refill from one queue. Knows nothing of Ray."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from engine.errors import EngineError
from engine.params import Request, Result

_STOP = object()
_SPARE = 8  # requests that wait in the engine's own queue, ready for the next free slots


class EngineThread:
    """Feeds requests to an engine and hands each result to whoever asked for it.

    When the engine raises, every open and every later call raises EngineError, and `on_failure` is called once, in this thread.

    Args:
        engine: anything with submit, step, has_work, max_batch, num_queued and num_running.
        on_failure: told the exception that ended the engine.
        on_progress: given the totals so far, at most once in `progress_s` and whenever the engine falls idle.
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
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards _failure against a submit that comes just as the thread ends
        self._failure: Exception | None = None
        self._backlog: deque[tuple[Request, Future]] = deque()
        self._open: dict[tuple[str | None, int], Future] = {}
        self._dropping = threading.Event()
        self._totals: Counter = Counter()
        self._told_at = 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def generate(self, requests: Sequence[Request]) -> list[Result | None]:
        """The results in the order of the requests, None for one that was dropped; waits for all of them.

        Raises EngineError when the engine failed.
        """
        pairs = [(request, Future()) for request in requests]
        with self._lock:
            if self._failure is not None:
                raise EngineError(f"the engine failed: {self._failure}") from self._failure
            for pair in pairs:
                self._inbox.put(pair)
        return [future.result() for _, future in pairs]

    def drop_waiting(self) -> None:
        """From now on no request is begun; those that the engine has already are finished."""
        self._dropping.set()

    def close(self) -> None:
        """Ends the thread once the engine has nothing more to do."""
        self._inbox.put(_STOP)
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._take_requests():
                for result in self._engine.step():
                    self._deliver(result)
                self._tell()
        except Exception as error:  # whatever it is, the callers must not wait for ever
            self._fail(error)

    def _take_requests(self) -> bool:
        """Moves the inbox into the engine, waiting only when there is nothing else to do; False when closed."""
        while True:
            self._feed()
            idle = not self._engine.has_work and not self._backlog
            if idle and self._open:
                raise EngineError(f"the engine is idle and {len(self._open)} requests have no result: {list(self._open)[:3]}")
            if idle:
                self._tell(now=True)
            try:
                item = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if item is _STOP:
                return False
            self._backlog.append(item)

    def _feed(self) -> None:
        """Gives the engine what it has room for. The rest stays here, where it can still be dropped."""
        engine = self._engine
        while self._backlog and (self._dropping.is_set() or engine.num_running + engine.num_queued < engine.max_batch + _SPARE):
            request, future = self._backlog.popleft()
            key = (request.id, request.sample)
            if self._dropping.is_set():
                future.set_result(None)
            elif key in self._open:
                future.set_exception(EngineError(f"request {key} is already running"))
            else:
                self._open[key] = future
                engine.submit(request)

    def _deliver(self, result: Result) -> None:
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

    def _tell(self, now: bool = False) -> None:
        if self._on_progress is None or not (now or time.monotonic() - self._told_at >= self._progress_s):
            return
        self._told_at = time.monotonic()
        self._on_progress(dict(self._totals))

    def _fail(self, error: Exception) -> None:
        if self._on_failure is not None:
            self._on_failure(error)
        with self._lock:
            self._failure = error
        while not self._inbox.empty():
            item = self._inbox.get()
            if item is not _STOP:
                item[1].set_exception(EngineError(f"the engine failed: {error}"))
        for future in [*self._open.values(), *(future for _, future in self._backlog)]:
            future.set_exception(EngineError(f"the engine failed: {error}"))
