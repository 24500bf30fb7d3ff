"""One loaded pair under several engines."""

from __future__ import annotations

import pytest

from engine import Engine, Request, SamplingParams, Speculation, UserError
from engine.pair import find_pair
from engine.stopwatch import PHASES, Stopwatch

REQUESTS = [
    Request(id=name, token_ids=[5, 6, 7, *more], params=SamplingParams(max_tokens=9, ignore_eos=True))
    for name, more in (("a", [8]), ("b", []))
]


def speculation(method: str) -> Speculation:
    return Speculation(method=method, tree_size=10, depth=3, top_k=4)


def test_engines_over_one_pair_are_those_that_load_their_own(tiny):
    pair = find_pair(tiny.target_folder, tiny.draft_folder, method="rheo", dtype="float32").load()
    shared = {method: Engine.over(pair, speculation=speculation(method), seed=3) for method in ("rheo", "off", "coupled")}
    for _ in range(2):  # the engines in turn, each with its own caches
        for method, engine in shared.items():
            own = Engine.load(tiny.target_folder, tiny.draft_folder, dtype="float32", speculation=speculation(method), seed=3)
            assert [r.token_ids for r in engine.generate(REQUESTS)] == [r.token_ids for r in own.generate(REQUESTS)]
    assert shared["off"].decoder.bytes_per_token < shared["rheo"].decoder.bytes_per_token


def test_a_pair_without_a_draft_runs_plain_alone(tiny):
    pair = find_pair(tiny.target_folder, method="off", dtype="float32").load()
    assert len(Engine.over(pair, speculation=Speculation(method="off")).generate(REQUESTS)) == 2
    with pytest.raises(UserError, match=r"speculation\.method='rheo' needs a draft"):
        Engine.over(pair, speculation=speculation("rheo"))


@pytest.mark.parametrize("method", ["off", "rheo"])
def test_a_watch_is_told_of_every_pass(tiny, method):
    pair = find_pair(tiny.target_folder, tiny.draft_folder, method="rheo", dtype="float32").load()
    watch = Stopwatch("cpu")
    results = Engine.over(pair, speculation=speculation(method), max_batch=2, watch=watch).generate(REQUESTS)
    prefill, *cycles = watch.passes
    assert (prefill.reads_prompt, prefill.num_rows, prefill.num_tokens) == (True, 2, 7)
    assert not any(timed.reads_prompt for timed in cycles)
    assert sum(timed.num_rows for timed in cycles) == sum(len(result.cycles) for result in results)
    assert sum(timed.num_tokens for timed in cycles) == sum(1 + cycle.drafted for result in results for cycle in result.cycles)
    for timed in watch.passes:
        seconds = timed.seconds()
        assert tuple(seconds) == PHASES
        assert min(seconds.values()) > 0
