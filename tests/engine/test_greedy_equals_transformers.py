"""At T = 0 each method emits what transformers' own `generate(do_sample=False)` emits, token by token (FIELD-CASES B15, B35, B36)."""

from __future__ import annotations

import pytest

from engine import SamplingParams, Verification
from tests.engine.tiny_engines import random_prompts, run

LENGTH = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=LENGTH)

METHODS = [
    ("off", {}),
    *(("rheo", {"m": m, "tree_size": 12}) for m in (0, 1, 2, 3)),
    *(("rheo", {"m": m, "tree_size": tree_size}) for m, tree_size in ((1, 1), (0, 2), (1, 2), (2, 3), (3, 3))),
    ("rheo", {"m": 2, "verification": Verification(order="deterministic_first")}),
    ("rheo", {"draft_top": 5}),
    *(("topk", {"tree_size": tree_size}) for tree_size in (2, 12)),
    *(("coupled", {"tree_size": tree_size}) for tree_size in (2, 12)),
    *(("chain", {"tree_size": tree_size, "depth": 3}) for tree_size in (2, 4)),
    ("topk", {"tree_size": 60, "depth": 5, "top_k": 10}),
]


@pytest.mark.parametrize("method, options", METHODS, ids=lambda value: value if isinstance(value, str) else str(value))
def test_every_method_on_ragged_prompts(tiny, ragged_prompts, method, options):
    results = run(tiny.engine(method, max_batch=5, **options), ragged_prompts, GREEDY)
    assert [result.token_ids for result in results] == [tiny.greedy(prompt, LENGTH) for prompt in ragged_prompts]


@pytest.mark.parametrize("method", ["rheo", "topk", "coupled"])
def test_trees_that_hold_every_token(tiny, ragged_prompts, method):
    """The whole of two levels is drafted and accepted, from anywhere in the tree: accepted nodes must move in the cache."""
    prompts = ragged_prompts[:4]
    results = run(tiny.engine(method, max_batch=3, tree_size=1 + 24 + 24 * 24, depth=2, top_k=24), prompts, GREEDY)
    assert [result.token_ids for result in results] == [tiny.greedy(prompt, LENGTH) for prompt in prompts]
    accepted = [cycle.accepted for result in results for cycle in result.cycles]
    assert set(accepted) == {2}


@pytest.mark.parametrize("method", ["rheo", "topk", "coupled", "chain"])
@pytest.mark.parametrize("max_batch", [1, 5])
def test_draft_of_a_smaller_vocabulary(narrow, ragged_prompts, method, max_batch):
    """top_k exceeds the draft's 9 tokens: slots stay empty."""
    prompts = ragged_prompts[: max_batch + 2]
    results = run(narrow.engine(method, max_batch=max_batch, tree_size=40, top_k=12), prompts, GREEDY)
    assert [result.token_ids for result in results] == [narrow.greedy(prompt, LENGTH) for prompt in prompts]
    if method != "chain":
        assert sum(cycle.accepted for result in results for cycle in result.cycles) > 0


def test_a_short_prompt_beside_a_row_near_the_end_of_its_room(tiny):
    """The prefill's run is wider than what is left of the other row's place in the cache (128 tokens there)."""
    long, *short = random_prompts([100, *range(64, 54, -1)], seed=2)
    params = [SamplingParams(temperature=0.0, max_tokens=16), *[SamplingParams(temperature=0.0, max_tokens=2)] * len(short)]
    results = run(tiny.engine("rheo", max_batch=2, tree_size=4), [long, *short], params)
    assert [result.token_ids for result in results] == [
        tiny.greedy(prompt, each.max_tokens) for prompt, each in zip([long, *short], params, strict=True)
    ]


def test_everything_accepted(make_clock):
    """A draft that is always right: each cycle is as long as the tree is deep, and the text is still the target's."""
    clock = make_clock(list(range(3, 31)))
    for method in ("rheo", "topk", "coupled", "chain"):
        (result,) = run(clock.engine(method, tree_size=9, depth=4), [[0]], SamplingParams(temperature=0.0, max_tokens=21))
        assert result.token_ids == list(range(3, 24)), method
        assert [(cycle.accepted, cycle.emitted, cycle.depth) for cycle in result.cycles] == [(4, 5, 4)] * 4, method
