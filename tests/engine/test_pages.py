"""Which pages rows hold: as many as their texts need, wherever they lie, and none when they have ended."""

from __future__ import annotations

import pytest
import torch

from engine import Request, SamplingParams
from engine.pages import PAGE, PagePool, find_addresses, make_table
from tests.engine.tiny_engines import random_prompts

METHODS = ("off", "rheo", "coupled")


def requests() -> list[Request]:
    params = SamplingParams(max_tokens=70, ignore_eos=True)
    prompts = random_prompts([3, 100, 60, 64, 20, 130, 1], seed=7)
    return [Request(id=str(index), token_ids=prompt, params=params) for index, prompt in enumerate(prompts)]


def test_a_pool_gives_each_page_once():
    pool = PagePool(5)
    first, second = pool.take(3), pool.take(2)
    assert sorted(first + second) == list(range(5)) and pool.num_free == 0
    pool.give_back(first)
    assert pool.take(3) == first, "the memory that was used last is used again"
    with pytest.raises(AssertionError):
        pool.take(1)


def test_a_table_is_padded_with_the_rows_own_pages():
    table_BP = make_table([[4], [2, 0, 5]], torch.device("cpu"))
    assert table_BP.tolist() == [[4, 4, 4], [2, 0, 5]]
    addresses = find_addresses(table_BP, torch.tensor([0, 1, 1]), torch.tensor([9, 64, 130]))
    assert addresses.tolist() == [4 * PAGE + 9, 0, 5 * PAGE + 2]


@pytest.mark.parametrize("method", METHODS)
def test_rows_hold_what_their_texts_need(tiny, method):
    engine = tiny.engine(method, max_batch=3)
    for request in requests():
        engine.submit(request)
    while engine.has_work:
        engine.step()
        held = [page for row in engine.running for page in row.pages]
        assert len(held) == len(set(held)) == engine._pool.num_pages - engine._pool.num_free
        for row in engine.running:
            assert len(row.tokens) <= len(row.pages) * PAGE <= len(row.tokens) + 3 * PAGE
    assert engine._pool.num_free == engine._pool.num_pages


@pytest.mark.parametrize("method", METHODS)
def test_where_pages_lie_and_what_they_held_changes_nothing(tiny, method):
    """Pages in any order, and poisoned: what was there before a row took them is never seen."""
    expected = tiny.engine(method, max_batch=3, seed=1).generate(requests())
    engine = tiny.engine(method, max_batch=3, seed=1)
    order = torch.randperm(engine._pool.num_pages, generator=torch.Generator().manual_seed(0)).tolist()
    engine._pool.give_back(sorted(engine._pool.take(len(order)), key=order.__getitem__))
    for cache in engine.decoder._caches:
        cache.key.fill_(torch.nan)
        cache.value.fill_(torch.inf)
    found = engine.generate(requests())
    assert [result.token_ids for result in found] == [result.token_ids for result in expected]
    assert [result.cycles for result in found] == [result.cycles for result in expected]


def test_a_stream_that_is_left_gives_its_pages_back(tiny):
    engine = tiny.engine("rheo", max_batch=3)
    stream = engine.stream(requests())
    next(stream)
    assert engine._pool.num_free < engine._pool.num_pages
    stream.close()
    assert engine._pool.num_free == engine._pool.num_pages
