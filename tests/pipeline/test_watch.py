import threading

import pytest
import ray

from pipeline.watch import NodeLost, run_watched


class DeadNode:
    def dead_processes(self):
        return [("raylet", None)]


def test_work_that_never_comes_back_from_a_dead_node_is_given_up(monkeypatch):
    """As when a batch system sends SIGTERM to the whole group: Ray's own processes die, and its calls block."""
    monkeypatch.setattr(ray._private.worker, "_global_node", DeadNode())
    with pytest.raises(NodeLost, match="raylet"):
        run_watched(threading.Event().wait)


def test_what_the_work_raises_is_raised_here():
    with pytest.raises(ZeroDivisionError):
        run_watched(lambda: 1 / 0)
    run_watched(lambda: None)
