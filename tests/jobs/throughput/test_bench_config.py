import sys

import pytest

from engine.errors import UserError
from engine.models.presets import PRESETS
from jobs.throughput.cell import find_baseline, make_cells
from jobs.throughput.config import BenchConfig, load_bench_config
from jobs.throughput.run import run_bench
from pipeline.config_file import option_names

# A new option is a conscious change: it is added here too.
_TEXT = """
job.name job.seed
model.target model.draft model.dtype model.device model.attention model.revision model.max_model_len
prompts.path
grid.system grid.batch grid.method grid.tree_size grid.depth grid.m grid.temperature grid.prompt_tokens grid.output_tokens
measure.repeats measure.rows measure.rows_per_slot measure.baseline
peers
output.path
"""
OPTIONS = _TEXT.split()


def test_the_list_of_options_is_frozen():
    assert option_names(BenchConfig) == OPTIONS


def test_the_shipped_bench_loads():
    config = load_bench_config("jobs/throughput/bench.yaml")
    assert len(make_cells(config, PRESETS[config.model.target])) == 9


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("grid.batch=4", "grid.batch=4; allowed: a list of at least one value"),
        ("grid.batch=[0]", "grid.batch=[0] has 0; allowed: integers >= 1"),
        ("grid.method=[of]", "grid.method=['of'] has 'of'; allowed: rheo, coupled"),
        ("grid.system=[vllm]", "grid.system=['vllm'] has 'vllm'; allowed: engine, pipeline"),
        ("grid.temperature=[-1]", "grid.temperature=[-1] has -1; allowed: numbers >= 0"),
        ("grid.tree=[4]", "unknown option in 'grid' 'tree'"),
        ("measure.repeats=0", "measure.repeats=0; allowed: an integer >= 1"),
        ("measure.baseline.method=topk", "measure.baseline.method='topk' is not measured; allowed: off, rheo, or null"),
        ("grid.method=[rheo,coupled]", "is the baseline of none of 4 cells; allowed: values of the grid, or null"),
        ("measure.baseline={metod: off}", "unknown option in 'measure.baseline' 'metod'; did you mean 'method'?"),
        ("peers.vlm=this", "unknown option in 'peers' 'vlm'; did you mean 'vllm'?"),
        ("peers.vllm=/nowhere/python", "peers.vllm='/nowhere/python' is no program; allowed: the path of a Python interpreter, or this"),
        ("peers={ray-data-llm: this}", "measure.rows_per_slot=1 with peers.ray-data-llm, whose first batch is not timed; allowed: >= 2"),
        ("prompts.path=nowhere.jsonl", "prompts.path 'nowhere.jsonl': it does not exist"),
        ("model.target=nowhere", "unknown model.target 'nowhere'"),
        ("grid.m=[0,12]", "speculation.m=12; allowed: 0 to top_k-1 = 9"),
        ("grid.method=[off,static]", "speculation.topology='auto' has no tree"),
        ("grid.prompt_tokens=[3]", "grid.prompt_tokens has 3; allowed: more than 3, which the chat template takes"),
        ("grid.output_tokens=[510]", "a prompt of 5 tokens with grid.output_tokens=510; allowed: 512 together"),
        ("output.path=s3://bucket/out", "output.path='s3://bucket/out'; allowed: a local folder"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_loaded(load, override, words, monkeypatch):
    monkeypatch.setattr("engine.pair.load_causal_lm", lambda *_: pytest.fail("a model was loaded first"))
    with pytest.raises(UserError) as refused:
        run_bench(load(override))
    assert words in str(refused.value)


def test_cells_differ_in_what_counts_alone(load):
    """Plain decoding has no tree, and no method but `rheo` has an m."""
    config = load("grid.batch=[1,4]", "grid.method=[off,rheo,coupled]", "grid.tree_size=[4,8]", "grid.m=[0,1]")
    cells = make_cells(config, None)
    assert [cell.variant for cell in cells if cell.batch == 1] == [
        "off",
        *("rheo 4x2 m=0", "rheo 4x2 m=1", "rheo 8x2 m=0", "rheo 8x2 m=1"),
        *("coupled 4x2", "coupled 8x2"),
    ]
    assert len(cells) == 14


def test_sizes_that_are_not_given_are_the_preset_s(load):
    config = load("grid.method=[rheo]", "grid.batch=[1]", "grid.tree_size=[null]", "grid.depth=[null]")
    (cell,) = make_cells(config, PRESETS["smollm2-135m-instruct"])
    assert (cell.tree_size, cell.depth) == (8, 3)


def test_peers_have_no_method_and_baselines_are_found(load):
    config = load("grid.system=[engine,pipeline]", "peers={transformers: this, transformers-assisted: this}")
    assert config.peers["transformers"] == sys.executable
    cells = make_cells(config, None)
    found = {(cell.batch, cell.variant): find_baseline(cell, config.measure.baseline, cells) for cell in cells}
    assert {what: base and (base.batch, base.variant) for what, base in found.items()} == {
        (1, "off"): None,
        (1, "rheo 6x2 m=1"): (1, "off"),
        (1, "pipeline off"): (1, "off"),
        (1, "pipeline rheo 6x2 m=1"): (1, "off"),
        (1, "transformers"): (1, "off"),
        (1, "transformers-assisted"): (1, "off"),
        (2, "off"): None,
        (2, "rheo 6x2 m=1"): (2, "off"),
        (2, "pipeline off"): (2, "off"),
        (2, "pipeline rheo 6x2 m=1"): (2, "off"),
        (2, "transformers"): (2, "off"),
    }
    pipeline = next(cell for cell in cells if cell.variant == "pipeline rheo 6x2 m=1")
    assert find_baseline(pipeline, {"system": "engine"}, cells).variant == "rheo 6x2 m=1"


def test_a_measurement_has_whole_batches(load):
    config = load("measure.rows=6", "measure.rows_per_slot=2")
    assert [config.num_rows(batch) for batch in (1, 2, 4, 6, 16)] == [6, 6, 8, 12, 32]
