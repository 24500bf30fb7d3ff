import threading
import time

import pyarrow as pa
import pytest

from pipeline.commit import Committer


def rows(*numbers):
    return pa.table({"n": list(numbers)})


class Written(list):
    def __call__(self, table):
        self.append(table["n"].to_pylist())


def wait_for(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_part_is_written_once_it_is_full():
    written = Written()
    committer = Committer(written, rows_per_file=3, flush_s=1000)
    committer.add(rows(1, 2))
    time.sleep(0.05)
    assert written == []
    committer.add(rows(3, 4))
    wait_for(lambda: written == [[1, 2, 3]])
    committer.add(rows(5, 6, 7, 8, 9, 10, 11))
    wait_for(lambda: written == [[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    committer.close()
    assert written == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11]]


def test_a_row_waits_no_longer_than_asked():
    written = Written()
    committer = Committer(written, rows_per_file=100, flush_s=0.2)
    started = time.monotonic()
    committer.add(rows(1))
    time.sleep(0.1)
    committer.add(rows(2))
    wait_for(lambda: written)
    assert written == [[1, 2]]
    assert 0.2 <= time.monotonic() - started < 5
    committer.add(rows(3))
    wait_for(lambda: len(written) == 2)
    committer.close()
    assert written == [[1, 2], [3]]


def test_the_graph_waits_for_a_slow_disk():
    gate, written = threading.Event(), []

    def write(table):
        gate.wait()
        written.append(table.num_rows)

    committer = Committer(write, rows_per_file=2, flush_s=1000)
    added = []

    def fill():
        for number in range(40):
            committer.add(rows(number))
            added.append(number)

    thread = threading.Thread(target=fill)
    thread.start()
    time.sleep(0.2)
    assert len(added) <= 2 + 4 * 2
    gate.set()
    thread.join(10)
    committer.close()
    assert sum(written) == 40


def test_a_failure_of_the_disk_reaches_whoever_adds_and_whoever_closes():
    def write(table):
        raise ValueError("full")

    committer = Committer(write, rows_per_file=1)
    committer.add(rows(1))
    with pytest.raises(ValueError, match="full"):
        for _ in range(1000):
            committer.add(rows(2))
            time.sleep(0.01)
    with pytest.raises(ValueError, match="full"):
        committer.close()


def test_rows_that_come_after_the_end_are_left_to_the_next_run():
    written = Written()
    committer = Committer(written, rows_per_file=1)
    committer.close()
    committer.add(rows(1))
    assert written == []
