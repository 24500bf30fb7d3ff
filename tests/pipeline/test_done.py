import numpy as np

from pipeline.done import DoneSet


def test_what_was_added_is_there_and_nothing_else():
    random = np.random.default_rng(1)
    for num_rows in (1, 7, 8, 9, 64, 1000):
        done, expected = DoneSet(num_rows), set()
        for _ in range(6):
            numbers = random.integers(0, num_rows, size=random.integers(0, 2 * num_rows))
            is_new = done.add(numbers)
            for number, new in zip(numbers.tolist(), is_new.tolist(), strict=True):
                assert new == (number not in expected)
                expected.add(number)
            assert done.count == len(expected)
            assert set(np.flatnonzero(done.contains(np.arange(num_rows)))) == expected


def test_ranges_begin_and_end_anywhere():
    random = np.random.default_rng(2)
    is_done = random.random(61) < 0.5
    done = DoneSet(61)
    done.add(np.flatnonzero(is_done))
    for first in range(61):
        for end in range(first, 62):
            np.testing.assert_array_equal(done.range(first, end - first), is_done[first:end])


def test_a_row_takes_one_bit():
    done = DoneSet(2_000_000)
    done.add(np.array([0, 1_999_999]))
    assert sum(value.nbytes for value in vars(done).values() if isinstance(value, np.ndarray)) == 250_000
    assert done.range(1_999_990, 10).tolist() == [False] * 9 + [True]
