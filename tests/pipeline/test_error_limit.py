import pyarrow as pa
import pytest

from pipeline.error_limit import ErrorLimit


def rows(num_ok, num_errors):
    return pa.table({"status": ["ok"] * num_ok + ["error"] * num_errors})


@pytest.mark.parametrize(
    ("limit", "num_ok", "num_errors", "is_exceeded"),
    [
        (None, 0, 1000, False), (0, 5, 0, False), (0, 5, 1, True), (3, 0, 3, False), (3, 0, 4, True),
        (0.1, 0, 10, False), (0.1, 0, 11, True), (0.1, 900, 100, False), (0.1, 900, 101, True), (0.5, 0, 50, False),
    ],
)  # fmt: skip
def test_a_count_or_a_share(limit, num_ok, num_errors, is_exceeded):
    counter = ErrorLimit(limit)
    counter.add(rows(num_ok, 0))
    counter.add(rows(0, num_errors))
    assert counter.is_exceeded == is_exceeded


def test_rows_of_earlier_runs_count():
    counter = ErrorLimit(5, num_rows=10, num_errors=4)
    counter.add(rows(1, 1))
    assert not counter.is_exceeded
    counter.add(rows(1, 1))
    assert counter.is_exceeded
    assert counter.describe() == "6 of 14 rows failed; input.max_errors=5"
