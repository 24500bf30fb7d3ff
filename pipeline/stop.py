"""An end before the work is done: for SIGINT, SIGTERM, or a reason of the job's own.

Nothing new is begun, rows in flight get a while to finish, then they are given up. A second signal ends the process at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Iterator

import ray
from ray.data._internal.execution.execution_callback import ExecutionCallback

from engine.errors import EngineError
from pipeline.exit_codes import SIGNAL_BASE
from pipeline.notes import tell

# Kubernetes and Slurm kill 30 s after their SIGTERM, a spot node is taken away after 30 to 120 s.
GRACE_S = 20.0  # for rows in flight
START_S = 3.0  # for Ray to come to the end of its start, so that it can be shut down
ANSWER_S = 4.0  # for the workers to hand over what they have; the rest is for the last part and the end of Ray
_ONE_PRESS_S = 0.5  # `timeout`, for one, sends its signal twice: to the process, then to its group
_MESSAGE = f"rheo: stopping: rows in flight get {GRACE_S:.0f} s to finish (a second signal stops at once)"
_START_MESSAGE = "rheo: stopping"

_current: Stop | None = None  # of the module, as Ray makes the callback itself and pickles its class by name


class StopOverdue(Exception):
    """The work did not come to its end within the time that a stop gives it."""


class StopCallback(ExecutionCallback):
    """Once a stop is requested, ends the operators up to the one named `GenerateRows`, whose running calls are still awaited."""

    def on_execution_step(self, executor) -> None:
        topology = getattr(executor, "_topology", None)
        if topology is None:
            raise EngineError("this Ray's executor has no _topology; allowed: ray>=2.60,<2.61")
        if _current is None or not _current.requested:
            return
        if _current.is_overdue():
            raise StopOverdue  # here, as Ray ends the process with code 1 when it is shut down under a running execution
        for op, state in topology.items():  # in the order of the graph
            if "GenerateRows" in op.name:
                op.can_add_input = lambda: False  # readers that run go on reading, and would feed it
                state.inputs_done_called = True  # else a pool that is still loading warns of too few inputs
                if not op.num_active_tasks() and not op.internal_output_queue_num_blocks():
                    op.mark_execution_finished()  # drops what it holds, hence not before
                return
            op.mark_execution_finished()
            state.output_queue.clear()


class Stop:
    """A stop, requested or not; the first request counts.

    is_starting: Ray is, and nothing is in flight.
    """

    def __init__(self):
        self.is_starting = True
        self._ledger = None
        self._requests: list[tuple[int | str, float]] = []  # only appended to, so the first is the same for every thread

    def ray_has_started(self) -> None:
        """To be called in the main thread, right after ray.init."""
        signal.signal(signal.SIGTERM, _do_nothing)  # again, for a Ray that was imported before `pipeline.ray_session`, which see
        self.is_starting = False

    @contextlib.contextmanager
    def telling(self, ledger) -> Iterator[None]:
        """Within it engines run, and are told. ledger: the Ray actor made of `workers.ledger.Ledger`, which they listen to."""
        self._ledger = ledger
        if self.requested:
            self._tell()
        try:
            yield
        finally:
            self._ledger = None  # a call to it while Ray shuts down might never return

    @property
    def requested(self) -> bool:
        return bool(self._requests)

    @property
    def reason(self) -> int | str | None:
        """A signal's number, or what was given to `request`."""
        return self._requests[0][0] if self._requests else None

    def is_overdue(self, by_s: float = 0.0) -> bool:
        """Whether the time for a stop is over, since `by_s` seconds at least."""
        return self.requested and time.monotonic() >= self._requests[0][1] + GRACE_S + ANSWER_S + by_s

    def request(self, reason: int | str) -> None:
        """From any thread; does not wait."""
        self._requests.append((reason, time.monotonic()))
        self._tell()

    def _tell(self) -> None:
        ledger = self._ledger  # which another thread may be setting
        with contextlib.suppress(ray.exceptions.RayError):  # the signal went to Ray's processes as well: no engine is left
            if ledger is not None:
                ledger.stop.remote(GRACE_S)


@contextlib.contextmanager
def handle_signals() -> Iterator[Stop]:
    """Gives the stop that SIGINT and SIGTERM request. To be used in the main thread, around all that Ray does.

    A KeyboardInterrupt in the middle of ray.init would leave a Ray that crashes when the process ends, or hangs. So SIGINT waits for its
    end, but not for long. SIGTERM does not wait: it may have gone to Ray's processes too, and ray.init would wait for those.
    """
    global _current
    stop = _current = Stop()
    received, written = os.pipe()
    os.set_blocking(written, False)
    before_written = signal.set_wakeup_fd(written)
    before = {number: signal.signal(number, _do_nothing) for number in (signal.SIGINT, signal.SIGTERM)}
    # Python's own handlers wait until the main thread is back from C code, such as a slow upload; the pipe is written at once
    thread = threading.Thread(target=_listen, args=(received, stop), name="signals", daemon=True)
    thread.start()
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before_written)
        os.close(written)
        thread.join()
        os.close(received)
        _current = None


def _do_nothing(number: int, frame) -> None:
    """For `signal`: without a handler no signal is written to the pipe."""


def _listen(received: int, stop: Stop) -> None:
    """Requests the stop at the first signal and ends the process at the second; returns when the pipe is closed."""
    first_at = None
    while True:
        limit_s = START_S if first_at is not None and stop.is_starting else None
        if not select.select([received], [], [], limit_s)[0]:
            if stop.is_starting:
                os._exit(SIGNAL_BASE + signal.SIGINT)
            continue
        numbers = os.read(received, 1)
        if not numbers:
            return
        number = numbers[0]
        if number not in (signal.SIGINT, signal.SIGTERM):  # another handler's, of a library
            continue
        if first_at is None:
            if number == signal.SIGTERM and stop.is_starting:
                os._exit(SIGNAL_BASE + number)
            message = _START_MESSAGE if stop.is_starting else _MESSAGE
            first_at = time.monotonic()
            stop.request(number)
            tell(message)
        elif time.monotonic() - first_at > _ONE_PRESS_S:
            os._exit(SIGNAL_BASE + number)
