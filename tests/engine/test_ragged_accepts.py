"""Rows of a batch that accept different numbers of tokens: what was rejected takes no part in attention (FIELD-CASES B16)."""

from __future__ import annotations

import pytest
import torch

from engine import Request, SamplingParams
from engine.attention import SdpaPass
from engine.kv_cache import KVCache
from engine.new_tokens import NewTokens
from tests.engine.tiny_engines import read_cache

HEAD_DIM = 8


def attention_sum(num_cached: int) -> float:
    """The weight that a token gives to itself, at score 1, and to the first key of the cache, at score .5; three keys behind it are 0."""
    cache = KVCache(num_layers=1, num_kv_heads=1, head_dim=HEAD_DIM, dtype=torch.float32, device=torch.device("cpu"))
    cache.reserve(1)
    cache.clear([0])
    one = torch.ones(1, 1, HEAD_DIM)
    cache.key[0, 0, 0, 0], cache.value[0, 0, 0, 0] = 0.5 * one[0, 0] / HEAD_DIM, one[0, 0]
    new = NewTokens(
        table_BP=torch.zeros(1, 1, dtype=torch.long),
        prefix_B=torch.tensor([num_cached]),
        start_B=torch.tensor([0]),
        count_B=torch.tensor([1]),
        offset=0,
        visible_BQW=torch.ones(1, 1, 1, dtype=torch.bool),
    )
    return float(SdpaPass(cache, new)(0, one, one / HEAD_DIM, one, 1.0)[0, 0, 0])


def test_three_zero_keys():
    """Kept as part of the text they would scale the output to (e + e^.5) / (e + e^.5 + 3) = .593; behind the text they have no weight."""
    assert attention_sum(num_cached=4) == pytest.approx(0.593, abs=5e-4)
    assert attention_sum(num_cached=1) == pytest.approx(1, abs=1e-6)


#: the clock's token that each row may not say, and so how many of its seven right drafts are accepted
BANNED = {4: 0, 7: 3, 30: 7}


@pytest.mark.parametrize("method", ["topk", "coupled", "rheo"])
def test_accepts_of_0_3_and_7(make_clock, method):
    """The target's cache holds each row's text, and the next cycle reads no more of it than a row alone does."""
    clock = make_clock(list(range(3, 31)))
    requests = [
        Request(
            id=str(token),
            token_ids=[0],
            params=SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=True, logit_bias={token: -1000.0}),
        )
        for token in BANNED
    ]
    engine = clock.engine(method, tree_size=16, depth=7, top_k=2)
    for request in requests:
        engine.submit(request)
    engine.step()
    engine.step()
    rows = engine.running
    assert [row.cycles[0].accepted for row in rows] == list(BANNED.values())
    for row in rows:
        alone = clock.engine("off")
        alone.submit(Request(id="x", token_ids=row.tokens[:-1], params=SamplingParams(max_tokens=2, ignore_eos=True)))
        alone.step()
        assert row.num_cached == len(row.tokens) - 1
        (same,) = alone.running
        for kept, expected in zip(read_cache(engine, row), read_cache(alone, same), strict=True):
            torch.testing.assert_close(kept, expected, rtol=1e-4, atol=1e-5)
    results = []
    while engine.has_work:
        results += engine.step()
    texts = {result.id: result.token_ids for result in results}
    assert texts == {result.id: result.token_ids for result in clock.engine("off").generate(requests)}
