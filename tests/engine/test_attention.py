"""The attention backends against a reference that looks at one token at a time (FIELD-CASES B16, B31)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from engine.attention import SdpaPass, find_backend
from engine.errors import UserError
from engine.kv_cache import KVCache
from engine.native.attention import NativePass
from engine.native.build import why_none
from engine.new_tokens import NewTokens
from engine.pages import PAGE
from tests.kernels import needs_kernels

LAYERS = 2
PAGES = 3  # of a row
GARBAGE = 1e4


@dataclass(frozen=True)
class Backend:
    """What is tested, over caches that it is for. tolerance: of numbers about 1."""

    kind: type[SdpaPass] | type[NativePass]
    head_dim: int
    dtype: torch.dtype
    tolerance: float

    def new_cache(self, num_pages: int, *, num_layers: int = 1, kv_heads: int = 1) -> KVCache:
        """Zeros."""
        shape = {"num_layers": num_layers, "num_kv_heads": kv_heads, "head_dim": self.head_dim}
        cache = KVCache(**shape, dtype=self.dtype, device=torch.device("cpu"))
        cache.reserve(num_pages)
        cache.clear(range(num_pages))
        return cache

    def check(self, found: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(found.float(), expected.float(), rtol=self.tolerance, atol=self.tolerance)


@pytest.fixture(
    params=[
        Backend(SdpaPass, 8, torch.float32, 1e-5),
        pytest.param(Backend(NativePass, 64, torch.bfloat16, 2e-2), marks=needs_kernels),
        pytest.param(Backend(NativePass, 128, torch.bfloat16, 2e-2), marks=needs_kernels),
    ],
    ids=["sdpa", "native-64", "native-128"],
)
def backend(request) -> Backend:
    return request.param


@dataclass
class Case:
    """A pass over rows, and what each of its tokens may see: visible[n] lists (row, place) pairs."""

    cache: KVCache
    new: NewTokens
    query: Tensor
    key: Tensor
    value: Tensor
    place_N: list[tuple[int, int]]
    visible: list[list[tuple[int, int]]]


def random_case(backend: Backend, seed: int, *, kv_heads: int = 2, group: int = 2, prompts: bool = True, offset: int = 0) -> Case:
    """Rows of random prefixes and random trees, some of them without tokens; long prompts beside them. Their pages lie
    anywhere; all else in those is garbage, and all other pages are no numbers."""
    generator = torch.Generator().manual_seed(seed)

    def randint(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    num_rows, width = randint(1, 6), randint(1, 9)
    prefixes = [randint(1, 40) for _ in range(num_rows)]
    counts = [randint(0, width + 1) for _ in range(num_rows)]
    lengths = {row: randint(1, 90) for row in range(num_rows) if prompts and randint(0, 3) == 0}
    for row in lengths:
        counts[row] = 0
        prefixes[row] *= randint(0, 2)
    num_pages = num_rows * PAGES + 2
    cache = backend.new_cache(num_pages, num_layers=LAYERS, kv_heads=kv_heads)
    table_BP = torch.randperm(num_pages, generator=generator)[: num_rows * PAGES].view(num_rows, PAGES)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, backend.head_dim, generator=generator).to(backend.dtype)

    for stored in (cache.key, cache.value):
        stored.fill_(torch.nan)
        stored[:, table_BP.flatten()] = GARBAGE

    num_columns = offset + width
    visible_BQW = torch.zeros(num_rows, width, num_columns, dtype=torch.bool)
    place_N: list[tuple[int, int]] = []
    visible: list[list[tuple[int, int]]] = []
    for row, (prefix, count) in enumerate(zip(prefixes, counts, strict=True)):
        for place in range(prefix + offset):
            address = torch.tensor([int(table_BP[row, place // PAGE]) * PAGE + place % PAGE])
            for layer in range(LAYERS):
                cache.write(layer, address, randn(1, kv_heads), randn(1, kv_heads))
        for token in range(width):  # padded queries too have some mask
            parent = randint(0, token) if token else None
            if parent is not None:
                visible_BQW[row, token] = visible_BQW[row, parent]
            elif offset:
                visible_BQW[row, token, randint(0, offset)] = True
            visible_BQW[row, token, offset + token] = True
        for token in range(count):
            place_N.append((row, prefix + offset + token))
            columns = visible_BQW[row, token].nonzero().flatten().tolist()
            visible.append([(row, place) for place in [*range(prefix), *(prefix + column for column in columns)]])
    for row, length in lengths.items():
        prefix = prefixes[row]
        for token in range(length):
            place_N.append((row, prefix + token))
            visible.append([(row, place) for place in range(prefix + token + 1)])

    count_B = torch.tensor(counts)
    num_tokens = len(place_N)
    return Case(
        cache=cache,
        new=NewTokens(
            table_BP=table_BP,
            prefix_B=torch.tensor(prefixes),
            start_B=count_B.cumsum(0) - count_B,
            count_B=count_B,
            offset=offset,
            visible_BQW=visible_BQW,
            prompts=tuple(lengths.items()),
        ),
        query=randn(num_tokens, kv_heads * group),
        key=randn(num_tokens, kv_heads),
        value=randn(num_tokens, kv_heads),
        place_N=place_N,
        visible=visible,
    )


def reference(case: Case, layer: int, scale: float) -> Tensor:
    """Softmax attention of one token and head at a time, over the listed places only."""
    tables = case.new.table_BP.tolist()
    stored = (case.cache.key[layer].float(), case.cache.value[layer].float())
    key, value = (torch.stack([torch.cat([pages[page] for page in table], 1) for table in tables]) for pages in stored)
    for n, (row, place) in enumerate(case.place_N):
        key[row, :, place], value[row, :, place] = case.key[n], case.value[n]
    out = torch.empty(case.query.shape)
    group = case.query.shape[1] // key.shape[1]
    for n, places in enumerate(case.visible):
        rows, columns = (torch.tensor(column) for column in zip(*places, strict=True))
        for head in range(case.query.shape[1]):
            seen = key[rows, head // group, columns]
            weight = (seen @ case.query[n, head].float() * scale).softmax(0)
            out[n, head] = weight @ value[rows, head // group, columns]
    return out


@pytest.mark.parametrize("kv_heads, group", [(2, 2), (1, 3), (3, 1), (1, 50)])
@pytest.mark.parametrize("seed", range(6))
def test_random_trees_and_prompts(backend, seed, kv_heads, group):
    case = random_case(backend, seed, kv_heads=kv_heads, group=group)
    expected = [reference(case, layer, 0.2) for layer in range(LAYERS)]
    attend = backend.kind(case.cache, case.new)
    for layer in range(LAYERS):
        backend.check(attend(layer, case.query, case.key, case.value, 0.2), expected[layer])


@pytest.mark.parametrize("seed", range(6))
def test_levels_behind_earlier_ones(backend, seed):
    """As the draft grows a tree: the new tokens stand `offset` places behind the prefix, and see some of those in between."""
    case = random_case(backend, 100 + seed, prompts=False, offset=5)
    expected = reference(case, 1, 0.2)
    backend.check(backend.kind(case.cache, case.new)(1, case.query, case.key, case.value, 0.2), expected)


def test_a_pass_of_long_prompts_alone(backend):
    cases = (random_case(backend, seed) for seed in range(200))
    case = next(case for case in cases if len(case.new.prompts) > 1 and int(case.new.count_B.sum()) == 0)
    expected = reference(case, 0, 0.2)
    backend.check(backend.kind(case.cache, case.new)(0, case.query, case.key, case.value, 0.2), expected)


def test_queries_keys_and_values_can_be_parts_of_one_tensor(backend):
    case = random_case(backend, 3)
    expected = reference(case, 0, 0.2)
    parts = torch.cat([case.query, case.key, case.value], 1).split([case.query.shape[1], *[case.key.shape[1]] * 2], 1)
    backend.check(backend.kind(case.cache, case.new)(0, *parts, 0.2), expected)


def test_zeroed_places_take_no_share(backend):
    """Rejected keys are masked, not zeroed: three zero keys beside one of score 0 would leave a quarter of its value."""
    cache = backend.new_cache(2)
    one = torch.ones(1, 1, backend.head_dim, dtype=backend.dtype)
    new = NewTokens(
        table_BP=torch.tensor([[0], [1]]),
        prefix_B=torch.tensor([0, 4]),  # the other row makes four more keys part of the pass
        start_B=torch.tensor([0, 1]),
        count_B=torch.tensor([1, 0]),
        offset=0,
        visible_BQW=torch.ones(2, 1, 1, dtype=torch.bool),
    )
    assert torch.equal(backend.kind(cache, new)(0, one, 0 * one, one, 1.0), one)


def test_places_beyond_the_pages_are_not_asked_for(backend):
    """A row at the end of its page beside one with more new tokens: the padding must not reach behind the page's end."""
    cache = backend.new_cache(2)
    width = 10
    new = NewTokens(
        table_BP=torch.tensor([[1], [0]]),
        prefix_B=torch.tensor([63, 0]),
        start_B=torch.tensor([0, 1]),
        count_B=torch.tensor([1, width]),
        offset=0,
        visible_BQW=torch.ones(width, width, dtype=torch.bool).tril().expand(2, -1, -1),
    )
    tokens = torch.randn(1 + width, 1, backend.head_dim, generator=torch.Generator().manual_seed(0)).to(backend.dtype)
    out = backend.kind(cache, new)(0, tokens, tokens, tokens, 0.2)
    causal = torch.nn.functional.scaled_dot_product_attention(*[tokens[1:].float().transpose(0, 1)] * 3, is_causal=True, scale=0.2)
    backend.check(out[1:], causal.transpose(0, 1))


@pytest.mark.parametrize("broken", (torch.nan, torch.inf))
@pytest.mark.parametrize("part", ("query", "key"))
def test_what_is_no_number_stays_so(backend, part, broken):
    """A token that sees it must fail, and one that does not must not. (Values are not hidden so well: see KVCache.clear.)"""
    cache, length = backend.new_cache(4), 70
    tokens = torch.randn(3, 2 * length, 1, backend.head_dim, generator=torch.Generator().manual_seed(0)).to(backend.dtype)
    tokens[("query", "key", "value").index(part), 66, 0, :2] = broken
    new = NewTokens(
        table_BP=torch.tensor([[2, 1], [3, 0]]),
        prefix_B=torch.zeros(2, dtype=torch.long),
        start_B=torch.zeros(2, dtype=torch.long),
        count_B=torch.zeros(2, dtype=torch.long),
        offset=0,
        visible_BQW=torch.zeros(2, 0, 0, dtype=torch.bool),
        prompts=((0, length), (1, length)),
    )
    is_finite = backend.kind(cache, new)(0, *tokens, 0.2).isfinite().flatten(1).all(-1)
    expected = torch.ones(2 * length, dtype=torch.bool)
    expected[66 : 67 if part == "query" else length] = False
    assert torch.equal(is_finite, expected)


def test_a_context_of_many_blocks(backend):
    """More keys than are looked at together, with scores that rise and fall."""
    cache, length = backend.new_cache(11), 700
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(length, 1, backend.head_dim, generator=generator).to(backend.dtype)
    keys = (tokens * torch.linspace(0.2, 1.5, length).roll(300).view(-1, 1, 1)).to(backend.dtype)
    none = torch.zeros(1, 0, 0, dtype=torch.bool)
    new = NewTokens(
        table_BP=torch.arange(11).flip(0).unsqueeze(0),
        prefix_B=torch.tensor([0]),
        start_B=torch.tensor([0]),
        count_B=torch.tensor([0]),
        offset=0,
        visible_BQW=none,
        prompts=((0, length),),
    )
    out = backend.kind(cache, new)(0, tokens, keys, tokens, 0.2)
    inputs = (x.float().transpose(0, 1) for x in (tokens, keys, tokens))
    causal = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True, scale=0.2)
    backend.check(out, causal.transpose(0, 1))


def test_the_backend_is_found_by_what_the_cache_holds(monkeypatch):
    small = Backend(SdpaPass, 8, torch.bfloat16, 0).new_cache(1)
    exact = Backend(SdpaPass, 64, torch.float32, 0).new_cache(1)
    fitting = Backend(NativePass, 64, torch.bfloat16, 0).new_cache(1)
    assert find_backend("sdpa", fitting) == find_backend("auto", small) == find_backend("auto", exact) == "sdpa"
    assert find_backend("auto", fitting) == ("sdpa" if why_none() else "native")
    for cache, words in ((small, "heads of 64 or 128 channels, and the model's have 8"), (exact, "the model is in float32 on cpu")):
        with pytest.raises(UserError, match=f"model.attention='native': .*{words}; allowed: auto, sdpa"):
            find_backend("native", cache)
    monkeypatch.setattr("engine.native.attention.why_none", lambda: "the processor has no AVX-512 with bf16")
    assert find_backend("auto", fitting) == "sdpa"
    with pytest.raises(UserError, match="no AVX-512"):
        find_backend("native", fitting)
