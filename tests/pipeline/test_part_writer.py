"""No row twice and none lost, for every order in which a run and one left over from a kill can reach the folder."""

import itertools
import threading

import numpy as np
import pyarrow as pa
import pytest

from engine.errors import EngineError
from pipeline.done import DoneSet
from pipeline.part_writer import PartWriter, TakenOver
from pipeline.parts import encode_part, list_parts, read_parts
from pipeline.row_numbers import RowNumbers
from pipeline.schema import SCHEMA
from tests.pipeline.without_ray import MemoryFolder

NUM_ROWS = 12
ROW_NUMBERS = RowNumbers()
ROW_NUMBERS.add_run(0, 1)
ROW_NUMBERS.close(NUM_ROWS)


class WatchedFolder(MemoryFolder):
    """Sees to it that no row is there twice. before_create: called with the name, in the writer's thread."""

    def __init__(self):
        super().__init__()
        self.before_create = lambda name: None

    def create(self, name, data):
        self.before_create(name)
        super().create(name, data)
        assert len(set(self.rows())) == len(self.rows()), self.rows()


def make_table(rows) -> pa.Table:
    table = pa.Table.from_pylist([dict.fromkeys(SCHEMA.names)] * len(rows), schema=SCHEMA)
    columns = {"row_index": pa.array(rows, pa.int64()), "sample": pa.array([0] * len(rows), pa.int32()), "status": ["ok"] * len(rows)}
    for name, values in columns.items():
        table = table.set_column(table.schema.get_field_index(name), SCHEMA.field(name), values if name != "status" else pa.array(values))
    return table


def make_writer(folder, run_id, earlier=(), dropped=()):
    """A writer that has scanned the folder, and the rows that it still has to make."""
    parts = list_parts(folder)
    done = DoneSet(NUM_ROWS)
    for part in read_parts(folder, parts.values()):
        assert done.add(part.row_index).all()
    writer = PartWriter(
        folder, run_id=run_id, earlier_runs=set(earlier), dropped_runs=set(dropped), row_numbers=ROW_NUMBERS,
        done=done, next_part=max(parts, default=-1) + 1, before_first=lambda: None,
    )  # fmt: skip
    return writer, [row for row in range(NUM_ROWS) if not done.range(row, 1)[0]]


def tables(rows, size, backwards=False):
    rows = rows[::-1] if backwards else rows
    return [make_table(rows[at : at + size]) for at in range(0, len(rows), size)]


@pytest.mark.parametrize("num_whole", range(4))
@pytest.mark.parametrize("lands_at", range(8))
def test_a_put_of_a_killed_run_that_lands_late_adds_no_row_twice(num_whole, lands_at):
    """Run `old` is killed with part `num_whole` on its way; it lands just before the other's create number `lands_at`, or after all."""
    folder = WatchedFolder()
    writer, rows = make_writer(folder, "old")
    parts = tables(rows, 3)
    for table in parts[:num_whole]:
        writer.write(table)
    late = (f"rows/part-{num_whole:08}.parquet", encode_part(parts[num_whole], "old"))
    writer, rows = make_writer(folder, "new", earlier=["old"])
    creates = itertools.count()

    def land(name):
        if next(creates) == lands_at and late[0] not in folder.files:
            folder.files[late[0]] = late[1]

    folder.before_create = land
    for table in tables(rows, 2, backwards=True):
        writer.write(table)
    if late[0] not in folder.files:
        folder.files[late[0]] = late[1]
    assert folder.rows() == list(range(NUM_ROWS))


@pytest.mark.parametrize("order", sorted(set(itertools.permutations("AAAABBBB"))), ids="".join)
def test_two_runs_at_once_add_no_row_twice(order):
    """A letter lets that run's thread do one create. B scans at its first; A, whom B resumes, is never told."""
    folder = WatchedFolder()
    turns = {"A": threading.Semaphore(0), "B": threading.Semaphore(0)}
    idle = threading.Semaphore(0)
    outcome = {}
    folder.before_create = lambda name: (idle.release(), turns[threading.current_thread().name].acquire())

    def run(earlier):
        name = threading.current_thread().name
        turns[name].acquire()
        writer, rows = make_writer(folder, name, earlier=earlier)
        try:
            for table in tables(rows, 4, backwards=name == "B"):
                writer.write(table)
            outcome[name] = "done"
        except BaseException as error:
            outcome[name] = error
        idle.release()

    threads = {name: threading.Thread(target=run, args=(earlier,), name=name) for name, earlier in (("A", []), ("B", ["A"]))}
    for name in ("A", "B"):
        threads[name].start()
    for name in [*order, *"AAAABBBBAAAABBBB"]:
        if name not in outcome:
            turns[name].release()
            idle.acquire()
    for thread in threads.values():
        thread.join()
    assert outcome["B"] == "done"
    assert outcome["A"] == "done" or isinstance(outcome["A"], TakenOver)
    assert folder.rows() == list(range(NUM_ROWS))


def test_rows_of_an_overwritten_job_that_land_late_go_and_leave_their_number_taken():
    """Else a writer that has not read the parts above could take it, and write their rows once more."""
    folder = WatchedFolder()
    writer, rows = make_writer(folder, "new-1", dropped=["old-1"])
    folder.files["rows/part-00000000.parquet"] = encode_part(make_table([1, 2]), "old-2")
    for table in tables(rows, 4):
        writer.write(table)
    assert folder.rows() == list(range(NUM_ROWS))
    assert sorted(folder.files) == [f"rows/part-{number:08}.parquet" for number in (0, 1, 2, 3)]


def test_rows_that_come_twice_are_written_once():
    folder = WatchedFolder()
    writer, _ = make_writer(folder, "run")
    for rows in ([0, 1, 1, 0], [1, 2], [2, 0]):
        writer.write(make_table(rows))
    assert folder.rows() == [0, 1, 2]
    assert len(folder.files) == 2


def test_a_run_gives_way_to_a_newer_one_and_leaves_its_part():
    folder = WatchedFolder()
    writer, _ = make_writer(folder, "older")
    folder.files["rows/part-00000000.parquet"] = encode_part(make_table([5]), "newer")
    with pytest.raises(TakenOver, match="newer"):
        writer.write(make_table([1, 2]))
    assert folder.rows() == [5]


def test_what_is_to_be_done_first_is_done_before_the_first_part_only():
    folder, seen = WatchedFolder(), []
    writer, _ = make_writer(folder, "run")
    writer._before_first = lambda: seen.append(dict(folder.files))
    writer.write(make_table([1]))
    writer.write(make_table([2]))
    assert seen == [{}]


def test_numbers_beyond_eight_digits_are_in_order():
    folder = WatchedFolder()
    folder.files = {f"rows/part-{number}.parquet": b"" for number in ("100000000", "99999999")}
    assert list(list_parts(folder)) == [99999999, 100000000]
    assert np.all(np.diff(list(list_parts(folder))) > 0)


def test_a_key_that_the_job_has_not_is_told():
    writer, _ = make_writer(WatchedFolder(), "run")
    with pytest.raises(EngineError, match="row_index 12, sample 0, which the job has not"):
        writer.write(make_table([3, 12]))
