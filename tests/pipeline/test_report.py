"""What the closing summary says of rows that are there."""

from __future__ import annotations

import threading

from engine.params import Cycle, Result
from pipeline.folders import open_folder
from pipeline.parts import encode_part
from pipeline.report import render, summarize
from pipeline.schema import SCHEMA, make_record, make_table
from tests.pipeline.without_ray import MemoryFolder


def write_rows(folder, workers: dict[str, list[tuple[int, int]]], number: int = 0, run_id: str = "last") -> None:
    """Rows of each worker, as (prompt tokens, tokens accepted in the one cycle)."""
    (folder / "rows").mkdir(exist_ok=True)
    records = []
    for worker, rows in workers.items():
        for num_prompt_tokens, accepted in rows:
            cycle = Cycle(drafted=7, accepted=accepted, emitted=accepted + 1, depth=3, sampled_nodes=1, sampled_accepted=0, batch_size=1)
            tokens = list(range(accepted + 2))
            ids = {"id": str(len(records)), "sample": 0}
            result = Result(**ids, prompt="p", token_ids=tokens, text="t", finish_reason="stop", cycles=[cycle])
            result.num_prompt_tokens = num_prompt_tokens
            records.append(make_record(result, row_index=len(records), meta=None, worker=worker, depth=3))
    (folder / "rows" / f"part-{number:08}.parquet").write_bytes(encode_part(make_table(records), run_id))


def report(folder, trained_length: int | None = None, runs: tuple[str, ...] = ("last",)) -> list[str]:
    engine = {"method": "off", "dtype": "none", "device": "cpu", "max_batch": 1, "threads": 1, "draft_trained_length": trained_length}
    config = {"job": {"name": "job"}}
    timing = {"generate_s": 2.0, "load_s": 1.0}
    run = {"status": "finished", "num_rows": 3, "timing": timing, "engine": engine, "config": config, "run_id": "last", "runs": runs}
    return [" ".join(line.split()) for line in render(summarize(open_folder(str(folder))), run, "out").splitlines()]


def test_several_workers_are_told_apart(tmp_path):
    write_rows(tmp_path, {"host:1": [(5, 0), (5, 3)], "host:2": [(5, 1)]})
    lines = report(tmp_path)
    assert "worker host:1: 2 rows, 3.5 tokens/s, tau 2.500" in lines
    assert "worker host:2: 1 rows, 1.5 tokens/s, tau 2.000" in lines
    assert any(line.startswith("tau 2.333") for line in lines)


def test_one_worker_is_not_repeated(tmp_path):
    write_rows(tmp_path, {"host:1": [(5, 0), (5, 3)]})
    assert not any(line.startswith("worker") for line in report(tmp_path))


def test_rows_past_the_drafts_trained_length_are_told(tmp_path):
    """FIELD-CASES B27."""
    write_rows(tmp_path, {"host:1": [(5, 0), (2047, 3)]})
    told = [line for line in report(tmp_path, trained_length=2048) if line.startswith("draft")]
    assert told == ["draft trained on 2048 tokens, and worse behind them; longest row: 2052"]
    assert not any(line.startswith("draft") for line in report(tmp_path, trained_length=2052))


def test_the_speed_is_that_of_the_last_run(tmp_path):
    write_rows(tmp_path, {"host:1": [(5, 3)] * 50, "host:2": [(5, 3)]}, run_id="first")
    write_rows(tmp_path, {"host:3": [(5, 1)] * 2}, number=1)
    lines = report(tmp_path, runs=("first", "last"))
    assert "speed 3.0 tokens/s, 1.00 rows/s over 2.0s (start and model load: 1.0s)" in lines
    assert "runs 2; the last wrote 2 rows, the speed is its own" in lines
    assert not any(line.startswith("worker") for line in lines)
    assert "status 53 ok, 0 error" in lines


def test_parts_are_read_several_at_a_time():
    """Each is a round trip or two in an object store."""
    together = threading.Barrier(8, timeout=20)

    class SlowFolder(MemoryFolder):
        def open(self, name):
            together.wait()
            return super().open(name)

    folder = SlowFolder({f"rows/part-{number:08}.parquet": encode_part(SCHEMA.empty_table(), "run") for number in range(8)})
    assert summarize(folder).num_files == 8
