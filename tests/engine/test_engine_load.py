"""`Engine.load`: names, folders and options, and what it refuses before or while loading."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
import torch

from engine import Engine, Request, SamplingParams, Speculation, UserError, Verification
from tests.engine.tiny_engines import VOCAB
from tests.tiny_models import tiny_eagle3


def request(id: str, max_tokens: int = 6) -> Request:
    return Request(id=id, token_ids=[5, 6, 7], params=SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def test_load_takes_folders(tiny):
    engine = Engine.load(
        tiny.target_folder, tiny.draft_folder, dtype="float32", speculation=Speculation(tree_size=10, depth=3, top_k=4), seed=3
    )
    assert engine.speculation.tree_size == 10 and engine.max_model_len == 512 and engine.max_batch >= 1
    tokens = [result.token_ids for result in engine.generate([request("a"), request("b", 9)])]
    assert tokens == [result.token_ids for result in tiny.engine("rheo", seed=3).generate([request("a"), request("b", 9)])]


def test_load_without_speculation_needs_no_draft(tiny):
    engine = Engine.load(str(tiny.target_folder), dtype="float32", speculation=Speculation(method="off"))
    assert len(engine.generate([request("a")])[0].token_ids) == 6


def test_tree_size_and_depth_have_defaults(tiny):
    engine = Engine.load(tiny.target_folder, tiny.draft_folder, dtype="float32")
    assert (engine.speculation.tree_size, engine.speculation.depth) == (60, 8)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"speculation": Speculation(method="reho")}, ["speculation.method", "'reho'", "did you mean 'rheo'?", "coupled"]),
        ({"speculation": Speculation(method="static")}, ["speculation.topology='auto'", "topology file"]),
        ({"speculation": Speculation(method="static", topology="/nowhere.json")}, ["speculation.topology='/nowhere.json'"]),
        ({"speculation": Speculation(method="rheo", topology="mine.json")}, ["speculation.topology='mine.json'", "method=rheo"]),
        ({"speculation": Speculation(tree_size=0)}, ["speculation.tree_size=0", "an integer >= 1"]),
        ({"speculation": Speculation(tree_size=True)}, ["speculation.tree_size=True"]),
        ({"speculation": Speculation(depth=0)}, ["speculation.depth=0", "an integer >= 1"]),
        ({"speculation": Speculation(top_k=0)}, ["speculation.top_k=0", "an integer >= 1"]),
        ({"speculation": Speculation(m=-1)}, ["speculation.m=-1", "an integer >= 0"]),
        ({"speculation": Speculation(m=4, top_k=4)}, ["speculation.m=4", "0 to top_k-1 = 3"]),
        ({"speculation": Speculation(draft_top=1.5)}, ["speculation.draft_top=1.5"]),
        ({"speculation": Speculation(budget="auto")}, ["speculation.budget='auto'", "fixed"]),
        ({"speculation": Speculation(verification=Verification(rule="lossy"))}, ["verification.rule='lossy'", "lossless"]),
        ({"speculation": Speculation(verification=Verification(order="last"))}, ["verification.order='last'", "stochastic_first"]),
        (
            {"speculation": Speculation(method="topk", verification=Verification(order="deterministic_first"))},
            ["verification.order='deterministic_first'", "topk"],
        ),
        ({"dtype": "bf16"}, ["model.dtype", "'bf16'", "did you mean 'bfloat16'?"]),
        ({"dtype": "float64"}, ["model.dtype", "'float64'", "float32"]),
        ({"device": "gpu"}, ["model.device", "'gpu'", "cpu"]),
        ({"attention": "flash"}, ["model.attention", "'flash'", "sdpa", "not built yet"]),
        ({"attention": "sdap"}, ["model.attention", "'sdap'", "did you mean 'sdpa'?"]),
        ({"max_batch": 0}, ["engine.max_batch=0", "an integer >= 1"]),
        ({"max_batch": "many"}, ["engine.max_batch='many'", "auto"]),
        ({"max_model_len": 513}, ["model.max_model_len=513", "512"]),
        ({"reproducible": True, "dtype": "bfloat16"}, ["engine.reproducible=true", "bfloat16", "float32"]),
        ({"draft": "auto"}, ["model.draft='auto'", "method=off"]),
        ({"draft": "/nowhere"}, ["/nowhere"]),
        ({"target": "/nowhere"}, ["/nowhere"]),
        ({"target": "smollm2-135m-instuct"}, ["did you mean 'smollm2-135m-instruct'?"]),
    ],
    ids=str,
)
def test_load_refuses_by_name(tiny, options, words):
    options = {"target": tiny.target_folder, "draft": tiny.draft_folder, "dtype": "float32", **options}
    with pytest.raises(UserError) as caught:
        Engine.load(options.pop("target"), options.pop("draft"), **options)
    for word in words:
        assert word in str(caught.value)


def test_cuda_is_refused_where_there_is_none(tiny):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(UserError, match=r"model\.device='cuda'.*no GPU.*cpu"):
        Engine.load(tiny.target_folder, tiny.draft_folder, device="cuda")


def test_m_does_not_matter_to_other_methods(tiny):
    for method in ("topk", "coupled", "chain", "off"):
        Speculation(method=method, m=9, top_k=4).check()


def test_a_draft_for_another_target_is_refused(tiny, tmp_path):
    other = copy.deepcopy(tiny.target.config)
    other.vocab_size = VOCAB + 8
    draft = tiny_eagle3(tmp_path / "draft", other)
    with pytest.raises(UserError, match=f"vocab_size.*{VOCAB + 8}.*{VOCAB}"):
        Engine.load(tiny.target_folder, draft, dtype="float32")


def test_every_eos_of_the_generation_config_ends_a_row(tiny, tmp_path):
    """Chat models have several: Llama-3's end of turn is not always in config.json. transformers' generate stops at each."""
    folder = shutil.copytree(tiny.target_folder, tmp_path / "target")
    greedy = tiny.greedy([5, 6, 7], 14)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [2, greedy[3]]}))
    engine = Engine.load(folder, dtype="float32", speculation=Speculation(method="off"))
    (result,) = engine.generate([Request(token_ids=[5, 6, 7], params=SamplingParams(temperature=0.0, max_tokens=14))])
    assert result.token_ids == greedy[: greedy.index(greedy[3]) + 1]


def test_several_eos_in_the_config(tiny):
    greedy = tiny.greedy([5, 6, 7], 14)
    engine = tiny.engine("rheo", eos_token_ids=[2, greedy[3]])
    (result,) = engine.generate([Request(token_ids=[5, 6, 7], params=SamplingParams(temperature=0.0, max_tokens=14))])
    assert result.token_ids == greedy[: greedy.index(greedy[3]) + 1] and result.finish_reason == "stop"
