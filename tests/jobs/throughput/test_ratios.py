import math

import pytest

from jobs.throughput.cell import Cell
from jobs.throughput.measurement import Figures, Measurement
from jobs.throughput.ratios import ratios, spread
from jobs.throughput.store import Store


def cell(method: str) -> Cell:
    sizes = {"tree_size": None, "depth": None, "m": None}
    return Cell(system="engine", batch=1, method=method, **sizes, temperature=1.0, prompt_tokens=None, output_tokens=10)


def measurement(method: str, repeat: int, seconds: float) -> Measurement:
    numbers = {"num_rows": 1, "num_prompt_tokens": 1, "num_output_tokens": 10, "load_s": 0.0, "warmup_s": 0.0, "peak_memory_bytes": 1}
    return Measurement(cell=cell(method), repeat=repeat, started_at=0.0, figures=Figures(seconds=seconds, **numbers))


@pytest.mark.parametrize(
    ("num_values", "rank", "coverage"),
    [(1, 1, 0.0), (2, 1, 0.5), (5, 1, 0.9375), (6, 1, 0.96875), (9, 2, 0.9609375), (20, 6, 0.9586)],
)
def test_intervals_are_order_statistics(num_values, rank, coverage):
    values = [float(3 * n % num_values if num_values % 3 else n) for n in range(num_values)]
    found = spread(values)
    assert (found.low, found.high) == (rank - 1, num_values - rank)
    assert found.median == (num_values - 1) / 2
    assert math.isclose(found.coverage, coverage, abs_tol=1e-4)


def test_ratios_are_taken_within_a_round(tmp_path):
    """The machine is three times as slow in the second round, and the ratio does not see it. A round that lacks one of the two has none."""
    store = Store(tmp_path)
    for repeat, (plain, ours) in enumerate([(2.0, 1.0), (6.0, 4.0)]):
        store.add(measurement("off", repeat, plain))
        store.add(measurement("topk", repeat, ours))
    store.add(measurement("topk", 2, 1.0))
    assert ratios(store, cell("topk"), cell("off"), range(3)) == [2.0, 1.5]
    assert ratios(store, cell("topk"), cell("off"), [1]) == [1.5]
