"""Every row once, and of the right job: whatever kills a run, whatever it has sent comes late, and whoever else writes."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from engine.errors import EngineError, UserError
from pipeline.part_writer import TakenOver
from pipeline.parts import drop_errors
from tests.pipeline.without_ray import NUM_ROWS, Killed, MakeRows, MemoryFolder

OVERWRITE = ("output.overwrite=true", "job.seed=1")
RETRY = ("output.retry_errors=true",)


@pytest.fixture
def folder():
    return MemoryFolder()


def part(number: int) -> str:
    return f"rows/part-{number:08}.parquet"


def kill_at(folder: MemoryFolder, number: int, when: str) -> None:
    """The run is killed with the change number `number` that it makes."""
    made = [0]

    def act(what, name, do):
        made[0] += what in ("create", "replace", "delete")
        if made[0] > number:
            raise Killed
        if made[0] == number:
            if when == "after":
                do()
            made[0] += 1
            raise Killed
        return do()

    folder.act = act


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("killed", "then"),
    [((), ()), (RETRY, RETRY), (RETRY, ()), (OVERWRITE, OVERWRITE), (OVERWRITE, ("job.seed=1",))],
    ids=["new", "retry-again", "retry-then-not", "overwrite-again", "overwrite-then-not"],
)
def test_a_kill_at_any_change_of_the_folder_leaves_what_the_next_run_completes(run_on, killed, then, when):
    before = MemoryFolder()
    if killed:
        run_on(before, make=MakeRows("old"))
    for number in range(1, 100):
        folder = MemoryFolder(dict(before.files))
        kill_at(folder, number, when)
        try:
            run_on(folder, *killed, make=MakeRows(heals=True))
        except Killed:
            folder = MemoryFolder(folder.files)
        else:
            assert number > 6
            return
        assert len(set(folder.rows())) == len(folder.rows())
        if killed == OVERWRITE and folder.run["config"]["job"]["seed"] == 0:  # it has overwritten nothing yet
            then = OVERWRITE
        code = run_on(folder, *then, make=MakeRows(heals=True))
        texts = folder.texts()
        assert (folder.rows(), folder.run["status"]) == (list(range(NUM_ROWS)), "finished")
        assert code == (3 if None in texts.values() else 0)
        assert None not in texts.values() or (killed, then) == (RETRY, ())
        assert "old" not in texts.values() or killed == RETRY


def test_the_first_part_of_an_overwriting_run_may_still_come_when_all_others_are_gone(run_on, folder):
    run_on(folder)
    parts = folder.names("rows")
    kill_at(folder, 6, "before")  # run.json, four parts to be deleted, and then its first
    with pytest.raises(Killed):
        run_on(folder, *OVERWRITE)
    assert list(folder.files) == ["run.json"]
    folder = MemoryFolder(folder.files)
    assert run_on(folder, "job.seed=1") == 3
    assert not set(folder.files) & set(parts)
    assert folder.rows() == list(range(NUM_ROWS))


@pytest.mark.parametrize("number", [3, 4, 7])
def test_rows_of_an_overwritten_job_that_come_late_go_wherever_they_are(run_on, folder, number):
    """Numbers below the new job's first, its first, and one above."""
    run_on(folder, make=MakeRows("old"))
    late = folder.files[part(3)]
    kill_at(folder, 4, "before")  # with its parts 0 and 1 deleted
    with pytest.raises(Killed):
        run_on(folder, *OVERWRITE)
    folder = MemoryFolder(folder.files)
    del folder.files[part(3)]
    folder.files[part(number)] = late

    def require_none_old(what, name, do):
        assert what != "create" or "old" not in folder.texts().values()
        return do()

    folder.act = require_none_old
    run_on(folder, "job.seed=1")
    for again in (3, 99, number):
        folder.files[part(again)] = late
        run_on(folder, "job.seed=1")
        assert "old" not in folder.texts().values()
        assert folder.rows() == list(range(NUM_ROWS))
        assert number < 4 or part(number) in folder.files  # nobody may take its number


def test_two_runs_that_begin_a_job_at_once_make_rows_of_one_job(run_on, folder):
    first = MemoryFolder()
    run_on(first)
    run_on(folder)
    assert folder.run["run_id"] != first.run["run_id"]
    folder.files["run.json"] = first.files["run.json"]
    assert run_on(folder) == 3


def test_rows_of_an_unknown_job_are_refused(run_on, folder):
    run_on(folder, make=MakeRows("old"))
    run = folder.files["run.json"]
    run_on(folder, *OVERWRITE)
    folder.files["run.json"] = run  # sent by the first run before it was killed
    with pytest.raises(UserError, match=r"rows of another job.*output\.overwrite=true"):
        run_on(folder)
    assert run_on(folder, "output.overwrite=true") == 3
    assert folder.rows() == list(range(NUM_ROWS))


def test_error_rows_that_a_killed_run_takes_out_late_are_made_again(run_on, folder):
    run_on(folder)
    late = MemoryFolder(dict(folder.files))
    drop_errors(late, part(0))
    assert run_on(folder) == 3
    folder.files[part(0)] = late.files[part(0)]
    assert run_on(folder) == 3
    assert folder.rows() == list(range(NUM_ROWS))


@pytest.mark.parametrize(("stopped_by", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_retry_that_is_stopped_before_its_first_row_is_interrupted(run_on, folder, stopped_by, code):
    run_on(folder)
    assert run_on(folder, *RETRY, make=MakeRows(most=0, stopped_by=stopped_by)) == code
    assert (folder.run["status"], folder.rows()) == ("interrupted", list(range(NUM_ROWS)))
    assert run_on(folder, *RETRY, make=MakeRows(heals=True)) == 0


def test_a_retry_to_which_nothing_comes_back_has_failed(run_on, folder):
    run_on(folder)
    with pytest.raises(EngineError, match="9 of 12 rows came back"):
        run_on(folder, *RETRY, make=MakeRows(most=0))
    assert (folder.run["status"], folder.run["exit_code"]) == ("failed", 5)


def test_a_job_that_max_errors_stopped_starts_no_engine_again(run_on, folder):
    assert run_on(folder, "input.max_errors=1") == 6
    rows = folder.rows()
    assert run_on(folder, "input.max_errors=1", make=lambda *arguments: pytest.fail("started")) == 6
    assert folder.rows() == rows
    assert run_on(folder, "input.max_errors=3") == 3


@pytest.mark.parametrize("run", [b"{", b"[]", b'{"status": "finished"}', b'{"run_id": null}', b'{"run_id": "older"}'])
def test_an_output_with_a_broken_run_json_can_be_overwritten(run_on, folder, run):
    run_on(folder, make=MakeRows("old"))
    folder.files["run.json"] = run
    with pytest.raises(UserError, match=r"run\.json"):
        run_on(folder)
    assert run_on(folder, "output.overwrite=true") == 3
    assert folder.rows() == list(range(NUM_ROWS))
    assert "old" not in folder.texts().values()


def test_a_run_whose_run_json_is_gone_stops(run_on, folder):
    run_on(folder)
    del folder.files[part(1)]
    with pytest.raises(TakenOver, match=r"'memory/run\.json' is gone"):
        run_on(folder, make=MakeRows(before_row=lambda: folder.files.pop("run.json", None)))
    assert part(4) not in folder.files


@pytest.mark.parametrize("late_for", ["its first part", "its end"])
def test_a_run_json_that_a_killed_run_has_sent_late_is_written_over(run_on, folder, late_for):
    run_on(folder)
    run = folder.files["run.json"]
    del folder.files[part(1)]

    def land(what, name, do):
        if what == ("create" if late_for == "its end" else "read") and folder.run["status"] == "running":
            folder.files["run.json"] = run
        return do()

    folder.act = land
    run_on(folder)
    assert len(folder.run["runs"]) == 2
    assert (folder.run["status"], folder.rows()) == ("finished", list(range(NUM_ROWS)))


def test_the_dtype_is_known_before_the_first_part_is_there(run_on, folder):
    seen = []
    folder.act = lambda what, name, do: (seen.append(folder.run["engine"]["dtype"]) if what == "create" else None, do())[1]
    run_on(folder)
    assert set(seen) == {"float32"}


def test_the_closing_check_opens_each_part_once(run_on, folder):
    run_on(folder, "input.prompt=id")
    samples = folder.opened[4:]
    assert folder.opened[:4] == [part(number) for number in range(4)]
    assert samples == [part(0), part(1)]


@pytest.mark.parametrize("overrides", [(), OVERWRITE])
@pytest.mark.parametrize("meets", ["parts", "run.json"])
def test_a_run_that_is_being_stopped_gives_way_to_one_that_is_started_at_once(run_on, folder, meets, overrides, capsys):
    """The next run begins and ends once the old one has written a part. This one goes on then, or has come to its end."""
    row = [0]

    def wait_for(is_there):
        while not is_there():
            time.sleep(0.01)

    def start_the_next():
        wait_for(lambda: part(0) in folder.files)
        make = MakeRows("next", heals=True)
        assert run_apart(run_on, MemoryFolder(folder.files), *overrides, make=make) == 0

    def go_on():
        row[0] += 1
        if row[0] == 4:
            start_the_next()
        elif row[0] == 7:  # it finds that its second part is there
            wait_for(lambda: part(1) in folder.opened)
            time.sleep(0.1)

    goes_on = {"before_row": go_on} if meets == "parts" else {"before_end": start_the_next, "most": 3}
    assert run_on(folder, make=MakeRows("old", heals=True, stopped_by=signal.SIGTERM, **goes_on)) == 143
    assert folder.rows() == list(range(NUM_ROWS))
    assert folder.run["status"] == "finished"
    assert folder.run["config"]["job"]["seed"] == (1 if overrides else 0)
    assert set(folder.texts().values()) == ({"next"} if overrides else {"old", "next"})
    assert "another run" in capsys.readouterr().err
    assert run_on(folder, *overrides[1:]) == 0


def test_a_run_that_was_replaced_before_it_has_overwritten_anything_stops(run_on, folder):
    run_on(folder)
    del folder.files[part(1)]

    def start_another():
        if len(folder.run["runs"]) == 1:
            assert run_apart(run_on, MemoryFolder(folder.files)) == 3

    with pytest.raises(TakenOver, match=r"run\.json' is another run's now"):
        run_on(folder, *OVERWRITE, make=MakeRows("other", before_row=start_another))
    assert "other" not in folder.texts().values()
    assert run_on(folder) == 3


def run_apart(run_on, *arguments, **options):
    """In a thread of its own."""
    codes = []
    thread = threading.Thread(target=lambda: codes.append(run_on(*arguments, **options)))
    thread.start()
    thread.join()
    return codes[0]
