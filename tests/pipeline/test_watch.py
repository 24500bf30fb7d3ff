import threading
from types import SimpleNamespace

import pytest
import ray

from pipeline.stop import Stop
from pipeline.watch import NodeLost, WorkHung, run_watched


class DeadNode:
    def dead_processes(self):
        return [("raylet", None)]


@pytest.fixture
def stop():
    return Stop()


def test_work_that_never_comes_back_from_a_dead_node_is_given_up(monkeypatch, stop):
    """As when a batch system sends SIGTERM to the whole group: Ray's own processes die, and its calls block."""
    monkeypatch.setattr(ray._private.worker, "_global_node", DeadNode())
    with pytest.raises(NodeLost, match="raylet"):
        run_watched(threading.Event().wait, stop)


def test_what_the_work_raises_is_raised_here(stop):
    with pytest.raises(ZeroDivisionError):
        run_watched(lambda: 1 / 0, stop)
    run_watched(lambda: None, stop)


def test_hung_work_is_left_behind_when_a_stop_is_overdue(monkeypatch, stop):
    monkeypatch.setattr("pipeline.stop.GRACE_S", 0.1)
    monkeypatch.setattr("pipeline.stop.ANSWER_S", 0.1)
    monkeypatch.setattr("pipeline.watch._HUNG_S", 0.1)
    monkeypatch.setattr(ray._private.worker, "_global_node", SimpleNamespace(dead_processes=list))
    begun = threading.Event()

    def hang():
        begun.set()
        threading.Event().wait()

    threading.Thread(target=lambda: begun.wait() and stop.request("enough")).start()
    with pytest.raises(WorkHung):
        run_watched(hang, stop)


def test_the_first_reason_for_a_stop_counts(stop):
    assert (stop.requested, stop.reason, stop.is_overdue()) == (False, None, False)
    stop.request("too many errors")
    stop.request(15)
    assert (stop.requested, stop.reason, stop.is_overdue()) == (True, "too many errors", False)
