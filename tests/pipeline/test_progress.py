from pipeline.progress import describe
from pipeline.report import Summary, format_seconds


def state(**over):
    totals = {"rows": 20, "errors": 1, "tokens": 400, "cycles": 100, "accepted": 80}
    return {"num_ready": 1, "ready_at": 100.0, "totals": totals, **over}


def test_a_line_of_progress():
    assert describe(state(), 100, 110.0) == "20/100 rows | 2.00 rows/s | 40.0 tokens/s | tau 1.80 | 1 errors | 40.0s left"
    assert describe(state(num_ready=0, ready_at=None, totals={}), 100, 110.0) == "0/100 rows | loading the model"
    assert describe(state(totals={}), 100, 110.0) == "0/100 rows | 0 errors"
    assert describe(state(), 20, 110.0).endswith("writing")


def test_rows_that_are_generated_again_do_not_pass_the_total():
    assert describe(state(), 10, 110.0).startswith("10/10 rows")


def test_seconds():
    assert [format_seconds(s) for s in (1.54, 65, 11220)] == ["1.5s", "1m05s", "3h07m"]


def test_exit_codes():
    summary = Summary(num_rows=2)
    assert summary.exit_code == 0
    summary.status.update(["ok", "error"])
    assert summary.exit_code == 3
    summary.status.update({"ok": -1, "error": 1})
    assert summary.exit_code == 4
