"""Waits for Ray work without trusting Ray to come back: with its node process dead, it waits for ever."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from engine.errors import EngineError
from pipeline.stop import Stop

_POLL_S = 1.0
_HUNG_S = 2.0  # then not even Ray's executor has answered, which is asked first
_VITAL = {"raylet", "gcs_server"}


class WorkHung(Exception):
    """A stop is overdue, and the work has not even answered that; its thread is left behind."""


class NodeLost(Exception):
    """Ray's own processes on this machine are dead."""


def check_node() -> None:
    """Raises EngineError when this Ray lacks the private name that is used here."""
    import ray

    if not hasattr(ray._private.worker._global_node, "dead_processes"):
        raise EngineError(f"ray {ray.__version__} has no Node.dead_processes; allowed: ray>=2.60,<2.61")


def run_watched(work: Callable[[], None], stop: Stop) -> None:
    """Runs `work` in a thread and waits for it.

    Raises what it raises, NodeLost, and WorkHung.
    """
    import ray

    outcome: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # handed over: the waiting thread raises it
            outcome.put(error)
        else:
            outcome.put(None)

    threading.Thread(target=run, name="graph", daemon=True).start()
    while True:
        try:
            error = outcome.get(timeout=_POLL_S)
        except queue.Empty:
            if stop.is_overdue(by_s=_HUNG_S):
                raise WorkHung from None
            # not ray.nodes(): it blocks for a minute when the node is dead, and a second signal with it
            dead = [name for name, _ in ray._private.worker._global_node.dead_processes() if name in _VITAL]
            if dead:
                raise NodeLost(f"Ray's own process has died: {', '.join(dead)}") from None
            continue
        if error is not None:
            raise error
        return
