"""What a cycle records (DESIGN.md section 6, FIELD-CASES B12, B14)."""

from __future__ import annotations

import pytest

from engine import Cycle, SamplingParams
from tests.engine.tiny_engines import run

PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.mark.parametrize(
    "method, options, max_sampled",
    [
        ("rheo", {"tree_size": 12, "depth": 3, "top_k": 4}, 11),
        ("rheo", {"tree_size": 40, "depth": 2, "top_k": 24, "m": 0}, 25),
        ("coupled", {"tree_size": 12, "depth": 3, "top_k": 4}, 0),
        ("topk", {"tree_size": 60, "depth": 4, "top_k": 10}, 0),
        ("chain", {"tree_size": 4, "depth": 8, "top_k": 4}, 3),
    ],
    ids=str,
)
def test_invariants(tiny, ragged_prompts, method, options, max_sampled):
    max_batch = 3
    results = run(tiny.engine(method, max_batch=max_batch, **options), ragged_prompts, PARAMS)
    cycles = [cycle for result in results for cycle in result.cycles]
    for cycle in cycles:
        assert 1 <= cycle.drafted <= options["tree_size"] - 1
        assert 1 <= cycle.depth <= min(options["depth"], options["tree_size"] - 1, cycle.drafted)
        assert 0 <= cycle.accepted <= cycle.depth
        assert 1 <= cycle.emitted <= cycle.accepted + 1
        assert 0 <= cycle.sampled_accepted <= min(cycle.accepted, cycle.sampled_nodes)
        assert cycle.sampled_nodes <= min(max_sampled, cycle.drafted)
        assert 1 <= cycle.batch_size <= max_batch
    for result in results:
        assert result.finish_reason == "length"
        assert len(result.token_ids) == 20 == 1 + sum(cycle.emitted for cycle in result.cycles)
        assert all(cycle.emitted == cycle.accepted + 1 for cycle in result.cycles[:-1])
    assert any(cycle.accepted for cycle in cycles)
    assert any(cycle.sampled_nodes for cycle in cycles) == any(cycle.sampled_accepted for cycle in cycles) == (max_sampled > 0)
    assert {cycle.batch_size for cycle in cycles} >= {max_batch}


def test_full_trees_are_full(tiny, ragged_prompts):
    """There are always enough candidates here, so each tree has its whole size; a chain is as long as it may be."""
    for method, options, drafted in (
        ("rheo", {"tree_size": 12, "depth": 3, "top_k": 4}, 11),
        ("topk", {"tree_size": 2, "depth": 3, "top_k": 4}, 1),
        ("chain", {"tree_size": 4, "depth": 2}, 2),
        ("chain", {"tree_size": 3, "depth": 7}, 2),
    ):
        results = run(tiny.engine(method, **options), ragged_prompts[:2], PARAMS)
        assert {cycle.drafted for result in results for cycle in result.cycles} == {drafted}, (method, options)


def test_depth_is_the_pruned_trees_own(tiny, ragged_prompts, make_clock):
    """Three drafted tokens may be one level, two or three, whatever the configured depth; a draft that is sure builds a path."""
    results = run(tiny.engine("topk", tree_size=4, depth=3), ragged_prompts, PARAMS)
    assert {cycle.depth for result in results for cycle in result.cycles} == {1, 2, 3}
    clock = make_clock(list(range(3, 31)))
    (result,) = run(clock.engine("topk", tree_size=4, depth=6), [[0]], SamplingParams(temperature=0.0, max_tokens=9))
    assert [cycle.depth for cycle in result.cycles] == [3, 3]


def test_every_accepted_token_of_a_chain_was_sampled(tiny, ragged_prompts):
    for result in run(tiny.engine("chain", tree_size=4, depth=3), ragged_prompts, PARAMS):
        for cycle in result.cycles:
            assert cycle.sampled_accepted == cycle.accepted and cycle.sampled_nodes == cycle.drafted


def test_the_lead_is_told_from_the_sample(make_clock):
    """With m = 1 the accepted tokens are leads, with m = 0 they are samples; the text is the same."""
    clock = make_clock(list(range(3, 31)))
    for m, sampled in ((1, 0), (0, 3)):
        (result,) = run(clock.engine("rheo", tree_size=8, depth=3, m=m), [[0]], SamplingParams(temperature=0.0, max_tokens=9))
        assert [cycle.sampled_accepted for cycle in result.cycles] == [sampled] * 2
        assert [cycle.accepted for cycle in result.cycles] == [3] * 2


@pytest.mark.parametrize("method, options", [("off", {}), ("rheo", {"tree_size": 1}), ("coupled", {"tree_size": 1})], ids=str)
def test_plain_steps(tiny, method, options):
    (result,) = run(tiny.engine(method, **options), [[5, 6, 7]], SamplingParams(max_tokens=9, ignore_eos=True))
    plain = Cycle(drafted=0, accepted=0, emitted=1, depth=0, sampled_nodes=0, sampled_accepted=0, batch_size=1)
    assert result.cycles == [plain] * 8


def test_a_row_of_one_token_has_no_cycles(tiny):
    (result,) = run(tiny.engine("rheo"), [[5, 6, 7]], SamplingParams(max_tokens=1, ignore_eos=True))
    assert result.cycles == [] and len(result.token_ids) == 1 and result.finish_reason == "length"


def test_batch_size_counts_the_rows_of_the_round(tiny):
    """Rows of 2, 4 and 6 tokens: the prefill is no cycle, then the batch shrinks as they end."""
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in (2, 4, 6)]
    results = run(tiny.engine("off", max_batch=3), [[5], [6], [7]], params)
    assert [[cycle.batch_size for cycle in result.cycles] for result in results] == [[3], [3, 2, 2], [3, 2, 2, 1, 1]]
