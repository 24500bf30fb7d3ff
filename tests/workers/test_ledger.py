import time

from workers.ledger import Ledger

A, B, C = (0, 0), (1, 0), (2, 0)


def test_a_row_that_kills_twice_is_condemned_and_its_neighbours_are_not():
    ledger = Ledger()
    ledger.start("w")
    assert ledger.begin("w", [A, B]) == ([], [])
    assert ledger.start("w") is None  # the engine died with both
    assert ledger.begin("w", [A, B, C]) == ([A, B], [])
    assert ledger.begin_alone("w", A)
    ledger.end("w", [A])
    assert ledger.begin_alone("w", B)
    ledger.start("w")  # died with B alone; C was open, not alone
    assert ledger.begin("w", [A, B, C]) == ([C], [B])
    assert ledger.read()["num_condemned"] == 1
    assert ledger.read()["num_deaths"] == 2


def test_finished_rows_are_no_suspects():
    ledger = Ledger()
    ledger.start("w")
    ledger.begin("w", [A, B])
    ledger.end("w", [A])
    ledger.start("w")
    assert ledger.begin("w", [A, B]) == ([B], [])


def test_engines_that_only_die_are_not_started_for_ever():
    ledger = Ledger(max_idle_deaths=2)
    ledger.start("w")
    ledger.begin("w", [A])
    assert ledger.start("w") is None
    ledger.begin_alone("w", A)
    ledger.end("w", [])  # of a call whose rows were all suspects
    assert "died 2 times in a row" in ledger.start("w")


def test_a_finished_row_resets_the_count():
    ledger = Ledger(max_idle_deaths=2)
    for _ in range(5):
        assert ledger.start("w") is None
        ledger.begin("w", [A, B])
        ledger.end("w", [A])


def test_nothing_begins_once_stopped():
    ledger = Ledger()
    ledger.start("w")
    assert ledger.phase() == "run"
    ledger.stop(grace_s=60)
    assert ledger.begin("w", [A]) is None
    assert not ledger.begin_alone("w", A)
    assert ledger.phase() == "finish"


def test_running_rows_are_given_up_after_the_grace():
    ledger = Ledger()
    ledger.stop(grace_s=0.2)
    ledger.stop(grace_s=60)  # a second reason gives no more time
    assert ledger.phase() == "finish"
    time.sleep(0.25)
    assert ledger.phase() == "abandon"


def test_the_time_of_the_first_row_of_any_worker_stays():
    ledger, before = Ledger(), time.time()
    for worker in ("v", "w"):
        ledger.start(worker)
    ledger.progress("v", {})
    assert ledger.read()["first_row_at"] is None
    ledger.progress("w", {"rows": 1})
    first = ledger.read()["first_row_at"]
    assert before <= first <= time.time()
    ledger.start("w")
    ledger.progress("v", {"rows": 5})
    assert ledger.read()["first_row_at"] == first


def test_counts_of_dead_engines_stay():
    ledger = Ledger()
    ledger.start("w")
    ledger.progress("w", {"rows": 2, "tokens": 9})
    ledger.progress("w", {"rows": 3, "tokens": 12})
    ledger.start("w")
    ledger.progress("w", {"rows": 1, "tokens": 4})
    assert ledger.read()["totals"] == {"rows": 4, "tokens": 16, "errors": 0}


def test_an_error_row_that_is_brought_again_is_counted_once():
    ledger = Ledger()
    ledger.start("w")
    ledger.progress("w", {"rows": 3, "errors": 1})
    ledger.count_errors("w", [A, B])
    ledger.start("w")
    ledger.count_errors("w", [A])
    assert ledger.read()["totals"] == {"rows": 5, "errors": 3}


def test_the_reason_of_a_death_is_the_worker_s_own():
    ledger = Ledger()
    ledger.start("v")
    ledger.start("w")
    ledger.fail("w", "Traceback\nno memory\n")
    ledger.start("w")
    assert ledger.read()["last_death"] == "no memory"
    ledger.start("v")  # was killed, and said nothing
    ledger.start("w")
    assert ledger.read()["last_death"] == "its process ended"
