"""What takes memory, and what becomes of a device that has no more of it (FIELD-CASES A5, B30)."""

from __future__ import annotations

import re

import pytest
import torch

from engine import Engine, EngineError, Request, SamplingParams, Speculation
from engine import options as options_module
from engine import pair as pair_module
from engine.kv_cache import KVCache
from engine.pages import PAGE
from tests.engine.tiny_engines import run

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("method", ["rheo", "topk", "coupled", "chain"])
def test_the_output_head_runs_where_a_token_is_drawn_only(tiny, ragged_prompts, monkeypatch, method):
    """Never for the whole tree, or for all of a prompt: one place of each row at a time."""
    places = []
    logits = tiny.target.logits
    monkeypatch.setattr(tiny.target, "logits", lambda hidden_BH: (places.append(len(hidden_BH)), logits(hidden_BH))[1])
    results = run(tiny.engine(method, max_batch=3, tree_size=40, depth=4, top_k=8), ragged_prompts, PARAMS)
    assert max(places) <= 3
    num_visited = sum(1 + sum(cycle.accepted + 1 for cycle in result.cycles) for result in results)
    assert sum(places) == num_visited


def test_the_drafts_cache_counts(tiny):
    """Both caches share the limit."""
    num_places = 512
    engine = tiny.engine("rheo", max_batch=8, kv_cache_gib=num_places * tiny.engine("rheo").decoder.bytes_per_token / 2**30)
    assert engine.decoder.bytes_per_token > tiny.engine("off").decoder.bytes_per_token
    for index in range(12):
        engine.submit(Request(id=str(index), token_ids=[5, 6, 7] * (1 + 9 * (index % 3)), params=PARAMS))
    while engine.has_work:
        engine.step()
        caches = [engine.decoder.cache, *engine.decoder.drafter.caches]
        assert len(caches) == 2
        assert sum(cache.key.nbytes + cache.value.nbytes for cache in caches) <= num_places * engine.decoder.bytes_per_token


def test_the_limit_is_what_is_available(tiny, monkeypatch):
    """Of memory that the file cache holds too: it is given back when it is needed."""
    monkeypatch.setattr(options_module, "available_bytes", lambda: 2 * 2**20)
    engine = Engine.load(tiny.target_folder, dtype="float32", speculation=Speculation(method="off"))
    assert engine.decoder.cache.key.shape[1] == 2**20 // engine.decoder.bytes_per_token // PAGE


@pytest.mark.parametrize("gib, said", [(64 / 1024**2, r"needs 0\.\d\d MiB; allowed: 0\.05 MiB")])
def test_small_caches_are_told_in_mib(tiny, gib, said):
    (result,) = tiny.engine("off", kv_cache_gib=gib).generate([Request(token_ids=[5] * 100, params=PARAMS)])
    assert result.error.type == "out_of_memory" and re.search(said, result.error.message)


def _no_room(*_, **__):
    raise torch.OutOfMemoryError("no room")


def test_no_room_for_the_caches(tiny, monkeypatch):
    """The engine's error, with what to lower, as within a cycle."""
    reserve = KVCache.reserve
    monkeypatch.setattr(KVCache, "reserve", lambda cache, _: reserve(cache, 2**40))
    with pytest.raises(EngineError, match=r"out of memory for the caches; lower engine\.max_batch"):
        tiny.engine("rheo")


def test_no_room_for_the_models(tiny, monkeypatch):
    monkeypatch.setattr(pair_module, "load_causal_lm", _no_room)
    with pytest.raises(EngineError, match=r"out of memory .*model\.dtype"):
        Engine.load(tiny.target_folder, tiny.draft_folder, dtype="float32")
