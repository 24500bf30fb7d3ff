import tracemalloc

import numpy as np
import pytest

from pipeline.row_numbers import RowNumbers


def build(samples):
    """The numbers of records with so many rows each, runs as long as can be."""
    numbers = RowNumbers()
    for row_index, num_rows in enumerate(samples):
        if row_index == 0 or num_rows != samples[row_index - 1]:
            numbers.add_run(row_index, num_rows)
    numbers.close(len(samples))
    return numbers


@pytest.mark.parametrize("samples", [[1], [3], [1] * 9, [4, 4, 1, 4, 4], [1, 2, 3, 2, 1], [10_000, 1]])
def test_rows_are_numbered_in_the_order_of_record_and_sample(samples):
    numbers = build(samples)
    keys = np.array([(row_index, sample) for row_index, num_rows in enumerate(samples) for sample in range(num_rows)])
    assert (numbers.num_records, numbers.num_rows) == (len(samples), len(keys))
    shuffled = np.random.default_rng(0).permutation(len(keys))
    found = numbers(keys[shuffled, 0].astype(np.int64), keys[shuffled, 1].astype(np.int32))
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, shuffled)


def test_keys_that_the_job_has_not():
    numbers = build([2, 2, 1, 3])
    row_index, sample = (grid.ravel() for grid in np.meshgrid(np.arange(-3, 8), np.arange(-3, 6), indexing="ij"))
    found = numbers(row_index, sample.astype(np.int32))
    expected = {(0, 0): 0, (0, 1): 1, (1, 0): 2, (1, 1): 3, (2, 0): 4, (3, 0): 5, (3, 1): 6, (3, 2): 7}
    assert found.tolist() == [expected.get(key, -1) for key in zip(row_index.tolist(), sample.tolist(), strict=True)]
    assert numbers(np.array([2**62, -(2**62)]), np.array([0, 0], np.int32)).tolist() == [-1, -1]
    assert numbers(np.empty(0, np.int64), np.empty(0, np.int32)).tolist() == []
    assert build([])(np.array([0]), np.array([0], np.int32)).tolist() == [-1]


def test_numbers_go_beyond_32_bits():
    numbers = RowNumbers()
    numbers.add_run(0, 10_000)
    numbers.close(10**9)
    assert numbers.num_rows == 10**13
    assert numbers(np.array([10**9 - 1]), np.array([9_999], np.int32)).tolist() == [10**13 - 1]


def test_only_records_that_differ_take_memory():
    tracemalloc.start()
    numbers = RowNumbers()
    for bad in range(0, 1_000_000, 100):
        numbers.add_run(bad, 1)
        numbers.add_run(bad + 1, 4)
    numbers.close(1_000_000)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 50 * 10_000  # bytes
    assert numbers.num_rows == 4_000_000 - 3 * 10_000
