"""`Engine.load`: names, folders and options, and what it refuses before or while loading."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
import torch

from engine import Engine, Request, SamplingParams, Speculation, UserError, Verification
from engine import pair as pair_module
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
        ({"speculation": Speculation(budget="most")}, ["speculation.budget='most'", "fixed, auto"]),
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
        ({"kv_cache_gib": float("inf")}, ["engine.kv_cache_gib=inf", "a finite number > 0"]),
        ({"kv_cache_gib": float("nan")}, ["engine.kv_cache_gib=nan"]),
        ({"device": None}, ["model.device 'None'", "cpu"]),
        ({"device": "cpu:\u00b2"}, ["model.device 'cpu:\u00b2'"]),
        ({"dtype": None}, ["model.dtype 'None'", "float32"]),
        ({"dtype": ["float32"]}, ["model.dtype '['float32']'", "float32"]),
        ({"attention": None}, ["model.attention 'None'", "sdpa"]),
        ({"attention": []}, ["model.attention '[]'", "sdpa"]),
        ({"speculation": "rheo"}, ["speculation='rheo'", "a Speculation, or None"]),
        ({"speculation": Speculation(method=[])}, ["speculation.method '[]'"]),
        ({"speculation": Speculation(verification="lossless")}, ["speculation.verification='lossless'", "Verification(rule, order)"]),
        ({"speculation": Speculation(method="static", topology=None)}, ["speculation.topology=None", "auto, or a path"]),
        ({"draft": "/nowhere"}, ["/nowhere"]),
        ({"target": "/nowhere"}, ["/nowhere"]),
        ({"target": "smollm2-135m-instuct"}, ["did you mean 'smollm2-135m-instruct'?"]),
    ],
    ids=str,
)
def test_load_refuses_by_name(tiny, options, words, monkeypatch):
    """And before anything is loaded."""
    monkeypatch.setattr(pair_module, "load_causal_lm", lambda *_: pytest.fail("a model was loaded first"))
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


@pytest.mark.parametrize("method", ["topk", "coupled", "chain", "static", "off"])
def test_options_without_effect_are_refused(method):
    Speculation(method=method, m=1, draft_top=128, top_k=1).check()
    with pytest.raises(UserError, match=rf"speculation\.m=2; allowed: 1 \(not set\) with method={method}"):
        Speculation(method=method, m=2).check()
    if method in ("chain", "static"):
        Speculation(method=method, draft_top=64).check()
        return
    with pytest.raises(UserError, match=rf"speculation\.draft_top=64; allowed: 128 \(not set\) with method={method}"):
        Speculation(method=method, draft_top=64).check()


def test_options_that_say_what_is_so_are_taken():
    """LAW.md 2.3: a chain has no leads, and these two take the whole of the draft's vocabulary."""
    Speculation(method="chain", m=0).check()
    for method in ("topk", "coupled"):
        Speculation(method=method, draft_top=0).check()


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


def edit(path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("eos", [-1, VOCAB, [2, VOCAB], [True], "2", 2.5])
def test_an_eos_outside_the_vocabulary(tiny, tmp_path, name, eos, monkeypatch):
    folder = shutil.copytree(tiny.target_folder, tmp_path / "target")
    edit(folder / name, eos_token_id=eos)
    monkeypatch.setattr(pair_module, "load_causal_lm", lambda *_: pytest.fail("a model was loaded first"))
    with pytest.raises(UserError) as caught:
        Engine.load(folder, dtype="float32", speculation=Speculation(method="off"))
    assert f"{name} has eos_token_id={eos!r}; allowed: token ids from 0 to {VOCAB - 1}" in str(caught.value)


@pytest.mark.parametrize("eos", [-1, VOCAB])
def test_an_eos_given_from_outside_the_vocabulary(tiny, eos):
    with pytest.raises(UserError, match=rf"eos_token_id=\[2, {eos}\]; allowed: token ids from 0 to {VOCAB - 1}"):
        tiny.engine("rheo", eos_token_ids=[2, eos])


def test_the_tokenizers_eos_where_the_model_names_none(tiny, tmp_path):
    """Where the model names one, that one alone counts, as in transformers' generate."""
    greedy = tiny.greedy([5, 6, 7], 14)
    eos = greedy[3]
    for model_eos, expected in ((None, greedy[: greedy.index(eos) + 1]), (2, greedy)):
        folder = shutil.copytree(tiny.target_folder, tmp_path / f"target {model_eos}")
        for name in ("config.json", "generation_config.json"):
            edit(folder / name, eos_token_id=model_eos)
        edit(folder / "tokenizer_config.json", eos_token=f"w{eos}")
        engine = Engine.load(folder, dtype="float32", speculation=Speculation(method="off"))
        assert engine.tokenizer.eos_token_id == eos
        (result,) = engine.generate([Request(token_ids=[5, 6, 7], params=SamplingParams(temperature=0.0, max_tokens=14))])
        assert result.token_ids == expected


def test_several_eos_in_the_config(tiny):
    greedy = tiny.greedy([5, 6, 7], 14)
    engine = tiny.engine("rheo", eos_token_ids=[2, greedy[3]])
    (result,) = engine.generate([Request(token_ids=[5, 6, 7], params=SamplingParams(temperature=0.0, max_tokens=14))])
    assert result.token_ids == greedy[: greedy.index(greedy[3]) + 1] and result.finish_reason == "stop"


def test_a_machine_without_kernels_is_told_so(tiny, monkeypatch, caplog):
    monkeypatch.setattr("engine.options.why_none", lambda: "there is no C++ compiler")
    for dtype, is_told in (("float32", False), ("bfloat16", True)):
        caplog.clear()
        Engine.load(tiny.target_folder, speculation=Speculation(method="off"), dtype=dtype, device="cpu")
        assert ("takes up to twice as long: there is no C++ compiler" in caplog.text) == is_told
