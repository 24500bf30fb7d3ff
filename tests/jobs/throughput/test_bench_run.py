"""`rheo bench` from options to files, on a tiny pair."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from engine.errors import EngineError, UserError
from engine.stopwatch import PHASES
from jobs.throughput.bare_engine import BareEngine
from jobs.throughput.run import run_bench
from pipeline import exit_codes


def read_rows(out: Path) -> list[dict]:
    return pq.read_table(out / "measurements.parquet").to_pylist()


def test_a_bench_measures_every_cell_in_every_round(load, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    config = load("grid.temperature=[0,1.0]", "grid.prompt_tokens=[8]")
    assert run_bench(config) == exit_codes.OK
    out = Path(config.output.path)
    rows = read_rows(out)
    assert len(rows) == 2 * 2 * 2 * 2  # temperatures, batches, methods, rounds
    for row in rows:
        assert row["num_rows"] == 2
        assert row["num_output_tokens"] == 2 * 12
        assert row["num_prompt_tokens"] == 2 * 8
        phases = [row[f"{name}_s"] for name in (*PHASES, "prefill", "rest")]
        assert min(phases) >= 0
        assert sum(phases) == pytest.approx(row["seconds"])
        assert row["num_passes"] > row["num_cycle_passes"] == sum(count for _, count, _ in row["passes"])
        assert sum(seconds for _, _, seconds in row["passes"]) == pytest.approx(row["verify_s"])
        assert row["row_passes"] <= row["num_passes"] * row["batch"]
        assert row["peak_memory_bytes"] > 2**20
        assert (row["num_accepted"], row["num_cycles"]) == tuple(map(sum, zip(*row["positions"], strict=True)))
        if row["method"] == "off":
            assert row["num_cycles"] == 2 * 11
            assert [tokens for tokens, _, _ in row["passes"]] == [row["batch"]]
    assert all((out / f"{name}.png").stat().st_size > 10_000 for name in ("throughput_by_batch", "tau_by_position", "pass_cost"))
    evidence = json.loads((out / "bench.json").read_text())
    assert evidence["machine"]["cores"] >= 1
    assert evidence["versions"]["torch"]
    assert evidence["seed"] == 0
    assert len(evidence["cells"]) == 8
    assert all((line["ratio"] is None) == (line["cell"]["method"] == "off") for line in evidence["cells"])
    printed = capsys.readouterr().out
    assert "T=0, prompts of 8 tokens, 12 tokens out" in printed
    assert "rheo 6x2 m=1" in printed


def test_what_is_measured_is_not_measured_again(load, monkeypatch, capsys):
    config = load("grid.batch=[1]")
    measure, measured = BareEngine.measure, []

    def watched(self, cell, prompts, repeat):
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append((cell, repeat))
        return measure(self, cell, prompts, repeat)

    monkeypatch.setattr(BareEngine, "measure", watched)
    assert run_bench(config) == 130
    out = Path(config.output.path)
    assert len(read_rows(out)) == 3
    with (out / "measurements.jsonl").open("a") as file:
        file.write('{"system": "engi')  # by a kill
    monkeypatch.setattr(BareEngine, "measure", lambda self, *of: measured.append(of[::2]) or measure(self, *of))
    more = load("measure.repeats=3", "grid.batch=[1,2]")
    assert run_bench(more) == exit_codes.OK
    assert len(measured) == len(set(measured)) == len(read_rows(out)) == 3 * 2 * 2
    assert "interrupted; the same command goes on" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["job.seed=1", "measure.rows=4", "model.draft=ngram"])
def test_other_options_are_refused_by_name(load, change):
    run_bench(load("measure.repeats=1", "grid.batch=[1]"))
    name, _, value = change.partition("=")
    with pytest.raises(UserError, match=rf"{name}='?{value}'?, and what is in '.*' was measured with .*; allowed: the same"):
        run_bench(load("measure.repeats=1", "grid.batch=[1]", change))


def test_a_failure_keeps_what_is_measured(load, monkeypatch):
    measure = BareEngine.measure

    def failing(self, cell, prompts, repeat):
        if cell.method == "rheo":
            raise EngineError("out of memory")
        return measure(self, cell, prompts, repeat)

    monkeypatch.setattr(BareEngine, "measure", failing)
    config = load("grid.batch=[1]")
    with pytest.raises(EngineError, match="out of memory"):
        run_bench(config)
    assert [row["method"] for row in read_rows(Path(config.output.path))] == ["off"]


def test_the_pipeline_is_measured_beside_the_engine(load):
    config = load(
        "grid.system=[engine,pipeline]", "grid.batch=[2]", "grid.method=[rheo]", "measure.repeats=1", "measure.baseline.method=null"
    )
    assert run_bench(config) == exit_codes.OK
    engine, pipeline = sorted(read_rows(Path(config.output.path)), key=lambda row: row["system"])
    assert (engine["system"], pipeline["system"]) == ("engine", "pipeline")
    assert pipeline["num_output_tokens"] == engine["num_output_tokens"] == 2 * 12
    assert pipeline["num_prompt_tokens"] == engine["num_prompt_tokens"]
    assert pipeline["num_cycles"] > 0
    (line,) = [line for line in json.loads((Path(config.output.path) / "bench.json").read_text())["cells"] if line["ratio"]]
    assert line["cell"]["system"] == "pipeline"
