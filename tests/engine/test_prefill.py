"""Prompts are read in chunks: what a row says does not depend on how, and rows that decode beside it go on."""

from __future__ import annotations

import pytest
import torch

from engine import Engine, Request, SamplingParams
from engine.prefill import next_chunks
from tests.engine.test_draft_cache import dense_logits
from tests.engine.tiny_engines import random_prompts, run

METHODS = ["off", "rheo", "topk", "coupled", "chain"]
LENGTHS = [3, 150, 40, 7, 200, 1]


def chunked(engine: Engine, max_prefill_tokens: int) -> Engine:
    engine.decoder.max_prefill_tokens = max_prefill_tokens
    return engine


@pytest.mark.parametrize("chunk", [7, 100])
@pytest.mark.parametrize("method", METHODS)
def test_greedy_text_does_not_depend_on_the_chunks(tiny, method, chunk):
    prompts = random_prompts(LENGTHS, seed=5)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    results = run(chunked(tiny.engine(method, max_batch=3), chunk), prompts, params)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == tiny.greedy(prompt, 12)
        assert len(result.token_ids) == 1 + sum(cycle.emitted for cycle in result.cycles)


@pytest.mark.parametrize("method", METHODS)
def test_sampled_text_does_not_depend_on_the_chunks(tiny, method):
    prompts = random_prompts(LENGTHS, seed=6)
    params = SamplingParams(max_tokens=10, ignore_eos=True, logprobs=True)
    whole = run(tiny.engine(method, max_batch=6), prompts, params)
    in_chunks = run(chunked(tiny.engine(method, max_batch=6), 30), prompts, params)
    for one, other in zip(whole, in_chunks, strict=True):
        assert one.token_ids == other.token_ids and len(one.logprobs) == len(one.token_ids)
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-4, rtol=1e-3)


def test_rows_decode_while_a_long_prompt_is_read(tiny):
    engine = chunked(tiny.engine("rheo", max_batch=2), 20)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    short, long = random_prompts([5, 200], seed=7)
    engine.submit(Request(id="short", token_ids=short, params=params))
    engine.step()
    engine.submit(Request(id="long", token_ids=long, params=params))
    for step in range(1, 10):
        engine.step()
        of_short, of_long = sorted(engine.running, key=lambda row: len(row.request.id), reverse=True)
        assert len(of_short.cycles) == step
        assert (of_long.num_cached, of_long.num_output_tokens, of_long.cycles) == (20 * step, 0, [])
        assert of_long.num_draft_cached == 20 * (step - 1)  # the draft reads a chunk's features in the cycle after
    engine.step()
    assert of_long.num_output_tokens == 1


def test_the_draft_of_a_chunked_prompt_knows_all_of_it(tiny):
    engine = chunked(tiny.engine("rheo"), 9)
    (prompt,) = random_prompts([50], seed=8)
    engine.submit(Request(token_ids=prompt, params=SamplingParams(max_tokens=20, ignore_eos=True)))
    for _ in range(6):
        engine.step()
    (row,) = engine.running
    assert row.num_output_tokens == 1 and row.num_draft_cached == 45
    with torch.inference_mode():
        logits_U = engine.decoder.drafter._model.begin([row]).logits_BU[0]
    torch.testing.assert_close(logits_U, dense_logits(tiny, row.tokens), rtol=1e-3, atol=1e-4)


def test_no_token_is_drawn_before_the_prompts_end(tiny, monkeypatch):
    """A chunk that ends one token before it: the output head does not run, and no key of the first token is asked."""
    engine = chunked(tiny.engine("rheo"), 7)
    places = []
    logits = tiny.target.logits
    monkeypatch.setattr(tiny.target, "logits", lambda hidden_BH: (places.append(len(hidden_BH)), logits(hidden_BH))[1])
    engine.submit(Request(token_ids=[5] * 8, params=SamplingParams(max_tokens=2, ignore_eos=True)))
    engine.step()
    assert engine.running[0].num_cached == 7 and sum(places) == 0
    engine.step()
    assert sum(places) == 1


def test_the_first_that_came_reads_first(tiny):
    engine = chunked(tiny.engine("off", max_batch=8), 50)
    for n, length in enumerate([24, 24, 24, 90]):
        engine.submit(Request(id=str(n), token_ids=[5] * length, params=SamplingParams(max_tokens=20, ignore_eos=True)))
    engine._admit()
    assert [len(chunk) for chunk in next_chunks(engine.running, 50)] == [24, 24, 2, 0]
    engine.step()
    assert [len(chunk) for chunk in next_chunks(engine.running, 50)] == [0, 0, 22, 28]
