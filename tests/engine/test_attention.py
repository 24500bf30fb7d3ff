"""The attention backend against a reference that looks at one token at a time (FIELD-CASES B16, B31)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from engine.attention import NewTokens, SdpaPass
from engine.kv_cache import KVCache

HEAD_DIM, LAYERS = 8, 2
GARBAGE = 1e4


@dataclass
class Case:
    """A pass over rows, and what each of its tokens may see: visible[n] lists (slot, place) pairs."""

    cache: KVCache
    new: NewTokens
    query: Tensor
    key: Tensor
    value: Tensor
    place_N: list[tuple[int, int]]
    visible: list[list[tuple[int, int]]]


def random_case(seed: int, *, kv_heads: int = 2, group: int = 2, prompts: bool = True, offset: int = 0) -> Case:
    """Rows of random prefixes and random trees, some of them without tokens; long prompts beside them; all else in the cache is garbage."""
    generator = torch.Generator().manual_seed(seed)

    def randint(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    num_rows, first_slot, width = randint(1, 6), randint(0, 3), randint(1, 9)
    prefixes = [randint(1, 40) for _ in range(num_rows)]
    counts = [randint(0, width + 1) for _ in range(num_rows)]
    lengths = {row: randint(1, 90) for row in range(num_rows) if prompts and randint(0, 3) == 0}
    for row in lengths:
        counts[row] = 0
        prefixes[row] *= randint(0, 2)
    cache = KVCache(num_layers=LAYERS, num_kv_heads=kv_heads, head_dim=HEAD_DIM, dtype=torch.float32, device=torch.device("cpu"))
    cache.reserve(first_slot + num_rows + 1, 140)
    cache.key.fill_(GARBAGE)
    cache.value.fill_(GARBAGE)

    num_columns = offset + width
    visible_BQW = torch.zeros(num_rows, width, num_columns, dtype=torch.bool)
    place_N: list[tuple[int, int]] = []
    visible: list[list[tuple[int, int]]] = []
    for row, (prefix, count) in enumerate(zip(prefixes, counts, strict=True)):
        slot = first_slot + row
        for stored in (cache.key, cache.value):
            stored[:, slot, :, : prefix + offset] = torch.randn(LAYERS, kv_heads, prefix + offset, HEAD_DIM, generator=generator)
        for token in range(width):  # padded queries too have some mask
            parent = randint(0, token) if token else None
            if parent is not None:
                visible_BQW[row, token] = visible_BQW[row, parent]
            elif offset:
                visible_BQW[row, token, randint(0, offset)] = True
            visible_BQW[row, token, offset + token] = True
        for token in range(count):
            place_N.append((slot, prefix + offset + token))
            columns = visible_BQW[row, token].nonzero().flatten().tolist()
            visible.append([(slot, place) for place in [*range(prefix), *(prefix + column for column in columns)]])
    for row, length in lengths.items():
        slot, prefix = first_slot + row, prefixes[row]
        for token in range(length):
            place_N.append((slot, prefix + token))
            visible.append([(slot, place) for place in range(prefix + token + 1)])

    count_B = torch.tensor(counts)
    num_tokens = len(place_N)
    return Case(
        cache=cache,
        new=NewTokens(
            first_slot=first_slot,
            prefix_B=torch.tensor(prefixes),
            start_B=count_B.cumsum(0) - count_B,
            count_B=count_B,
            offset=offset,
            visible_BQW=visible_BQW,
            prompts=tuple(lengths.items()),
        ),
        query=torch.randn(num_tokens, kv_heads * group, HEAD_DIM, generator=generator),
        key=torch.randn(num_tokens, kv_heads, HEAD_DIM, generator=generator),
        value=torch.randn(num_tokens, kv_heads, HEAD_DIM, generator=generator),
        place_N=place_N,
        visible=visible,
    )


def reference(case: Case, layer: int, scale: float) -> Tensor:
    """Softmax attention of one token and head at a time, over the listed places only."""
    key, value = case.cache.key[layer].clone(), case.cache.value[layer].clone()
    for n, (slot, place) in enumerate(case.place_N):
        key[slot, :, place], value[slot, :, place] = case.key[n], case.value[n]
    out = torch.empty_like(case.query)
    group = case.query.shape[1] // key.shape[1]
    for n, places in enumerate(case.visible):
        slots, columns = (torch.tensor(column) for column in zip(*places, strict=True))
        for head in range(case.query.shape[1]):
            seen = key[slots, head // group, columns]
            weight = (seen @ case.query[n, head] * scale).softmax(0)
            out[n, head] = weight @ value[slots, head // group, columns]
    return out


@pytest.mark.parametrize("kv_heads, group", [(2, 2), (1, 3), (3, 1)])
@pytest.mark.parametrize("seed", range(6))
def test_random_trees_and_prompts(seed, kv_heads, group):
    case = random_case(seed, kv_heads=kv_heads, group=group)
    expected = [reference(case, layer, 0.4) for layer in range(LAYERS)]
    attend = SdpaPass(case.cache, case.new)
    for layer in range(LAYERS):
        torch.testing.assert_close(attend(layer, case.query, case.key, case.value, 0.4), expected[layer], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(6))
def test_levels_behind_earlier_ones(seed):
    """As the draft grows a tree: the new tokens stand `offset` places behind the prefix, and see some of those in between."""
    case = random_case(100 + seed, prompts=False, offset=5)
    expected = reference(case, 1, 0.3)
    torch.testing.assert_close(SdpaPass(case.cache, case.new)(1, case.query, case.key, case.value, 0.3), expected, rtol=1e-5, atol=1e-5)


def test_a_pass_of_long_prompts_alone():
    cases = (random_case(seed) for seed in range(200))
    case = next(case for case in cases if len(case.new.prompts) > 1 and int(case.new.count_B.sum()) == 0)
    expected = reference(case, 0, 0.4)
    torch.testing.assert_close(SdpaPass(case.cache, case.new)(0, case.query, case.key, case.value, 0.4), expected, rtol=1e-5, atol=1e-5)


def test_zeroed_places_take_no_share():
    """Rejected keys are masked, not zeroed: three zero keys beside one of score 0 would leave a quarter of its value."""
    cache = KVCache(num_layers=1, num_kv_heads=1, head_dim=HEAD_DIM, dtype=torch.float32, device=torch.device("cpu"))
    cache.reserve(2, 64)
    one = torch.ones(1, 1, HEAD_DIM)
    new = NewTokens(
        first_slot=0,
        prefix_B=torch.tensor([0, 4]),  # the other row makes four more keys part of the pass
        start_B=torch.tensor([0, 1]),
        count_B=torch.tensor([1, 0]),
        offset=0,
        visible_BQW=torch.ones(2, 1, 1, dtype=torch.bool),
    )
    assert torch.equal(SdpaPass(cache, new)(0, one, 0 * one, one, 1.0), one)


def test_places_beyond_the_slot_are_not_asked_for():
    """A row at the end of its slot beside one with more new tokens: the padding must not reach behind the slot's end."""
    cache = KVCache(num_layers=1, num_kv_heads=1, head_dim=HEAD_DIM, dtype=torch.float32, device=torch.device("cpu"))
    cache.reserve(2, 64)
    width = 10
    new = NewTokens(
        first_slot=0,
        prefix_B=torch.tensor([63, 0]),
        start_B=torch.tensor([0, 1]),
        count_B=torch.tensor([1, width]),
        offset=0,
        visible_BQW=torch.ones(width, width, dtype=torch.bool).tril().expand(2, -1, -1),
    )
    tokens = torch.randn(1 + width, 1, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    out = SdpaPass(cache, new)(0, tokens, tokens, tokens, 1.0)
    causal = torch.nn.functional.scaled_dot_product_attention(*[tokens[1:].transpose(0, 1)] * 3, is_causal=True, scale=1.0)
    torch.testing.assert_close(out[1:], causal.transpose(0, 1), rtol=1e-5, atol=1e-5)
