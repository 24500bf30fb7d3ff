"""Whoever counts tau in another way finds what it needs in the rows; what rheo prints is the pooled one (FIELD-CASES B13, B14)."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest

from engine.params import Cycle, Result
from pipeline.folders import open_folder
from pipeline.report import summarize
from pipeline.schema import make_record, make_table

DEPTH = 5
#: (accepted, emitted) of the cycles of two rows; the first row's last cycle is cut at EOS, which was drafted
ROWS = [[(2, 3), (5, 6), (3, 3)], [(0, 1)]]


def make_result(number: int, cycles: list[tuple[int, int]]) -> Result:
    counts = {"drafted": 20, "depth": DEPTH, "sampled_nodes": 4, "sampled_accepted": 0, "batch_size": 2}
    return Result(
        id=str(number),
        sample=0,
        prompt="p",
        token_ids=list(range(1 + sum(emitted for _, emitted in cycles))),
        text="t",
        finish_reason="stop",
        cycles=[Cycle(accepted=accepted, emitted=emitted, **counts) for accepted, emitted in cycles],
    )


def test_three_definitions_from_the_rows(tmp_path):
    (tmp_path / "rows").mkdir()
    results = [make_result(number, cycles) for number, cycles in enumerate(ROWS)]
    table = make_table([make_record(result, row_index=0, meta=None, worker="w", depth=DEPTH) for result in results])
    pq.write_table(table, tmp_path / "rows" / "part-00000000.parquet")
    rows = pq.read_table(tmp_path / "rows").to_pylist()

    accepted, cycles = (sum(row[name] for row in rows) for name in ("num_accepted_tokens", "num_cycles"))
    pooled = 1 + accepted / cycles
    of_rows = [1 + row["num_accepted_tokens"] / row["num_cycles"] for row in rows]
    emitted = [cycle["emitted"] for row in rows for cycle in row["cycles"]]
    assert (pooled, sum(of_rows) / 2, sum(emitted) / 4) == pytest.approx((3.5, (13 / 3 + 1) / 2, 13 / 4))
    assert summarize(open_folder(str(tmp_path))).tau == pytest.approx(pooled)

    assert [row["acceptance_histogram"] for row in rows] == [[0, 0, 1, 1, 0, 1], [1, 0, 0, 0, 0, 0]]
    assert [row["num_draft_tokens"] for row in rows] == [60, 20]
    assert [row["num_output_tokens"] for row in rows] == [13, 2]
