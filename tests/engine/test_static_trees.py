"""Static trees through the whole engine; their law is proven in tests/engine/law/test_static.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import Engine, SamplingParams, Speculation, UserError
from engine.drafts.eagle3 import Eagle3Draft
from engine.models.presets import PRESETS
from engine.topology import Topology, read_topology
from tests.engine.tiny_engines import run

PATHS = ((0,), (1,), (0, 0), (2,), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0), (0, 0, 1))
TOPOLOGY = Topology(path=Path("nine nodes"), paths=PATHS)


def static_engine(tiny, tree_size: int = 10, depth: int = 3, **options) -> Engine:
    speculation = Speculation(method="static", tree_size=tree_size, depth=depth)
    draft = Eagle3Draft(tiny.head, attention="sdpa")
    return Engine(tiny.target, draft, tiny.tokenizer, speculation=speculation, topology=TOPOLOGY, **options)


@pytest.mark.parametrize("tree_size, depth", [(10, 3), (6, 3), (4, 1), (2, 8)])
def test_greedy_text_is_the_targets(tiny, ragged_prompts, tree_size, depth):
    paths = [path for path in PATHS if len(path) <= depth][: tree_size - 1]
    params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
    results = run(static_engine(tiny, tree_size, depth, max_batch=3), ragged_prompts, params)
    assert [result.token_ids for result in results] == [tiny.greedy(prompt, 14) for prompt in ragged_prompts]
    cycles = [cycle for result in results for cycle in result.cycles]
    assert {(cycle.drafted, cycle.depth, cycle.sampled_nodes) for cycle in cycles} == {(len(paths), max(map(len, paths)), 0)}
    assert sum(cycle.accepted for cycle in cycles) > 0


def test_every_node_is_drawn_at_a_temperature(tiny, ragged_prompts):
    results = run(static_engine(tiny), ragged_prompts, SamplingParams(max_tokens=10, ignore_eos=True))
    for result in results:
        assert {(cycle.drafted, cycle.sampled_nodes) for cycle in result.cycles} == {(9, 9)}
        assert all(cycle.sampled_accepted == cycle.accepted for cycle in result.cycles[:-1])


def test_a_draft_of_few_tokens_fills_what_it_can(narrow):
    """9 tokens, of which 2 are kept: the third child does not exist."""
    speculation = Speculation(method="static", tree_size=10, depth=3, draft_top=2)
    engine = Engine(narrow.target, Eagle3Draft(narrow.head, attention="sdpa"), speculation=speculation, topology=TOPOLOGY)
    (result,) = run(engine, [[5, 6, 7]], SamplingParams(max_tokens=8, ignore_eos=True))
    assert {cycle.drafted for cycle in result.cycles} == {8}


def test_the_topology_must_be_large_enough(tiny):
    with pytest.raises(UserError, match=r"nine nodes.* has 3 within"):
        static_engine(tiny, tree_size=10, depth=1)


@pytest.mark.parametrize("preset", [preset for preset in PRESETS.values() if preset.topology], ids=lambda preset: preset.name)
def test_a_presets_topology_serves_every_tree_up_to_the_papers(preset):
    topology = read_topology(preset.topology)
    for num_nodes, depth in [(preset.tree_size - 1, preset.depth), (8, 8), (16, 8), (32, 8), (59, 8)]:
        assert len(topology.first(num_nodes, depth)) == num_nodes
