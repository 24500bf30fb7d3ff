"""SIGINT and SIGTERM: rows in flight are finished and written, nothing new is begun. A second signal ends the process at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from ray.data._internal.execution.execution_callback import ExecutionCallback

from engine.errors import EngineError
from pipeline.exit_codes import SIGNAL_BASE

_requested = threading.Event()  # of the module, as Ray makes the callback itself and pickles its class by name


class StopCallback(ExecutionCallback):
    """Once a stop is requested, closes the operators above the one named `GenerateRows`, so that Ray Data comes to its end."""

    def on_execution_step(self, executor) -> None:
        topology = getattr(executor, "_topology", None)
        if topology is None:
            raise EngineError("this Ray's executor has no _topology; allowed: ray>=2.60,<2.61")
        if not _requested.is_set():
            return
        for op, state in topology.items():  # in the order of the graph
            if "GenerateRows" in op.name:
                return
            op.mark_execution_finished()
            state.output_queue.clear()


@contextlib.contextmanager
def handle_signals(on_stop: Callable[[], None]) -> Iterator[Callable[[], int | None]]:
    """Gives a function that returns the signal that asked for the stop, or None. Install it after ray.init, which sets its own handlers."""
    received: list[int] = []

    def handle(number: int, frame) -> None:
        if received:
            os._exit(SIGNAL_BASE + number)
        received.append(number)
        _requested.set()
        print("rheo: stopping: rows in flight are being finished (a second signal stops at once)", file=sys.stderr, flush=True)
        threading.Thread(target=on_stop, daemon=True).start()  # a handler must not wait

    _requested.clear()
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received[0] if received else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
