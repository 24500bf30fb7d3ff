from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.errors import UserError
from jobs.throughput.bare_engine import BareEngine
from jobs.throughput.measurement import Figures
from jobs.throughput.tune import tune
from pipeline.checks import check_config
from pipeline.config import load_config

GRID = ("grid.batch=[2]", "grid.method=[off,rheo,coupled]", "grid.tree_size=[4,8]", "grid.m=[0,1]")


@pytest.fixture
def rates(monkeypatch):
    """Tokens per second by variant, in place of measuring; notes what would be measured."""
    chosen, measured = {}, []

    def measure_as_told(self, cell, prompts, repeat):
        measured.append((cell.variant, repeat))
        rate = chosen[cell.variant]
        return Figures(
            num_rows=len(prompts),
            num_prompt_tokens=1,
            num_output_tokens=1000,
            seconds=1000 / (rate(repeat) if callable(rate) else rate),
            load_s=0.0,
            warmup_s=0.0,
            peak_memory_bytes=1,
        )

    monkeypatch.setattr(BareEngine, "measure", measure_as_told)
    chosen.update({"off": 80.0, "rheo 4x2 m=0": 60.0, "rheo 4x2 m=1": 100.0, "rheo 8x2 m=0": 20.0, "rheo 8x2 m=1": 69.0})
    chosen.update({"coupled 4x2": lambda repeat: 90.0 if repeat == 0 else 120.0, "coupled 8x2": 10.0})
    return chosen, measured


def test_the_best_cell_goes_into_a_new_job_file(load, rates, tmp_path, capsys):
    _, measured = rates
    job = tmp_path / "tuned.yaml"
    config = load(*GRID)
    assert tune(config, job) == 0
    tuned = load_config(str(job))
    check_config(tuned)
    assert (tuned.speculation.method, tuned.speculation.tree_size, tuned.speculation.depth) == ("coupled", 4, 2)
    assert (tuned.engine.max_batch, tuned.model.target, tuned.model.draft) == (2, config.model.target, config.model.draft)
    by_round = [sorted(variant for variant, repeat in measured if repeat == wanted) for wanted in range(6)]
    kept = ["coupled 4x2", "off", "rheo 4x2 m=1"]
    assert by_round == [sorted(rates[0]), kept, kept, *[["coupled 4x2", "off"]] * 3]
    assert "the best that was found, coupled 4x2, is 1.50 times plain decoding in 3 fresh rounds" in capsys.readouterr().out
    assert json.loads((Path(config.output.path) / "bench.json").read_text())["tuned"]["over_off"]["median"] == pytest.approx(1.5)


def test_in_a_job_file_that_is_there_only_speculation_changes(load, rates, tmp_path):
    job = tmp_path / "job.yaml"
    before = (
        "# mine\ninput:\n  path: in.jsonl  # keep\nspeculation:\n  # old\n  method: topk\n\n  tree_size: 9\n# and\noutput: {path: out}\n"
    )
    job.write_text(before)
    with pytest.raises(UserError, match="'speculation' does not end where its indented lines end"):
        tune(load(*GRID), job)
    job.write_text(before.replace("\n\n", "\n"))
    tune(load(*GRID), job)
    new = 'speculation: {method: "coupled", tree_size: 4, depth: 2}'
    assert job.read_text() == f"# mine\ninput:\n  path: in.jsonl  # keep\n{new}\n# and\noutput: {{path: out}}\n"
    assert load_config(str(job)).speculation.method == "coupled"


def test_where_no_draft_pays_the_job_is_told_to_be_plain(load, rates, tmp_path):
    """One that was lucky in the rounds before the fresh ones is not believed."""
    chosen, _ = rates
    chosen["coupled 4x2"] = lambda repeat: 120.0 if repeat < 3 else 70.0
    tune(load(*GRID), tmp_path / "tuned.yaml")
    tuned = load_config(str(tmp_path / "tuned.yaml"))
    check_config(tuned)
    assert (tuned.speculation.method, tuned.model.draft) == ("off", "auto")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("grid.batch=[1,2]", "grid.batch=[1, 2] with --tune; allowed: one value"),
        ("grid.system=[engine,pipeline]", "grid.system and peers name engine, pipeline with --tune; allowed: engine"),
        ("grid.method=[off]", "grid.method=['off'] with --tune; allowed: off, which is compared with, and at least one"),
        ("grid.method=[rheo]", "grid.method=['rheo'] with --tune; allowed: off, which is compared with"),
    ],
)
def test_a_grid_of_another_shape_is_refused(load, tmp_path, override, words):
    with pytest.raises(UserError) as refused:
        tune(load(*GRID, override), tmp_path / "tuned.yaml")
    assert words in str(refused.value)


def test_a_file_that_is_no_job_is_refused(load, tmp_path):
    with pytest.raises(UserError, match="there is no folder"):
        tune(load(*GRID), tmp_path / "nowhere" / "tuned.yaml")
    (tmp_path / "tuned.yaml").write_text("grid: {}\n")
    with pytest.raises(UserError, match="unknown section 'grid'"):
        tune(load(*GRID), tmp_path / "tuned.yaml")
