import io
import sys
import threading
import time

import pytest
from rich.console import Console

from pipeline.progress import ProgressView, describe
from pipeline.report import Summary
from pipeline.wording import format_seconds


def state(**over):
    totals = {"rows": 20, "errors": 1, "tokens": 400, "cycles": 100, "accepted": 80}
    return {"num_ready": 1, "ready_at": 100.0, "totals": totals, **over}


def test_a_line_of_progress():
    assert describe(state(), 100, 110.0) == "20/100 rows | 2.00 rows/s | 40.0 tokens/s | tau 1.80 | 1 errors | 40.0s left"
    assert describe(state(num_ready=0, ready_at=None, totals={}), 100, 110.0) == "0/100 rows | loading the model"
    assert describe(state(totals={}), 100, 110.0) == "0/100 rows | 0 errors"
    assert describe(state(), 20, 110.0).endswith("writing")


def test_rows_of_an_earlier_run_are_done_from_the_start_and_make_no_rate():
    assert describe(state(num_ready=0, ready_at=None, totals={}), 100, 110.0, num_done=60) == "60/100 rows | loading the model"
    assert describe(state(totals={}), 100, 110.0, num_done=60) == "60/100 rows | 0 errors"
    assert describe(state(), 100, 110.0, num_done=60) == "80/100 rows | 2.00 rows/s | 40.0 tokens/s | tau 1.80 | 1 errors | 10.0s left"
    assert describe(state(), 80, 110.0, num_done=60).endswith("writing")
    assert describe(state(), 75, 110.0, num_done=60).startswith("75/75 rows")


def test_rows_that_are_generated_again_do_not_pass_the_total():
    assert describe(state(), 10, 110.0).startswith("10/10 rows")


def listen(monkeypatch, is_terminal) -> io.StringIO:
    """What a view prints that shows everything at once."""
    told = io.StringIO()
    monkeypatch.setattr("pipeline.progress.Console", lambda file: Console(file=told, force_terminal=is_terminal, width=200))
    monkeypatch.setattr(sys, "stderr", told)
    monkeypatch.setattr("pipeline.progress._POLL_S", 0.01)
    monkeypatch.setattr("pipeline.progress._LINE_S", 0.0)
    return told


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_death_is_told_with_its_reason(monkeypatch, is_terminal):
    told, polls = listen(monkeypatch, is_terminal), threading.Semaphore(0)

    def read():
        polls.release()
        return state(num_deaths=1, last_death="[/usr/lib/x.so] is gone")

    with ProgressView(read, 100):
        for _ in range(3):
            assert polls.acquire(timeout=10)  # the thread goes on after the message
    assert "an engine died ([/usr/lib/x.so] is gone)" in told.getvalue()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_view_shows_what_is_done_already(monkeypatch, is_terminal):
    told, polls = listen(monkeypatch, is_terminal), threading.Semaphore(0)

    def read():
        polls.release()
        return state(num_deaths=0)

    with ProgressView(read, 100, num_done=60):
        for _ in range(100):  # a terminal is drawn anew ten times a second
            assert polls.acquire(timeout=10)
    assert "80/100 rows" in told.getvalue()


def test_a_view_whose_ledger_is_gone_closes_all_the_same(monkeypatch):
    monkeypatch.setattr("pipeline.progress._JOIN_S", 0.1)
    reading, gone = threading.Event(), threading.Event()

    def read():
        reading.set()
        gone.wait(60)

    with ProgressView(read, 100):
        assert reading.wait(10)
        started = time.monotonic()
    assert time.monotonic() - started < 10
    gone.set()


def test_seconds():
    assert [format_seconds(s) for s in (1.54, 65, 11220)] == ["1.5s", "1m05s", "3h07m"]


def test_exit_codes():
    summary = Summary(num_rows=2)
    assert summary.exit_code == 0
    summary.status.update(["ok", "error"])
    assert summary.exit_code == 3
    summary.status.update({"ok": -1, "error": 1})
    assert summary.exit_code == 4
