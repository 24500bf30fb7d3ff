"""The budget on real engines: what a controller may change, and what it may not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from engine import SamplingParams
from engine.budget.acceptance import accepted_within
from engine.budget.costs import Curve
from engine.budget.plan import PLAIN, Plan, Setting, grid
from engine.law.tree import prune
from engine.params import Speculation
from engine.row import Row
from tests.engine.tiny_engines import run

PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)


class ForcedBudget:
    """Another setting every cycle, and other rows that take it."""

    SETTINGS = (PLAIN, Setting(2, 1), Setting(8, 3), Setting(4, 2), PLAIN, PLAIN, Setting(10, 3))

    def __init__(self) -> None:
        self._number = 0

    def plan(self, rows: Sequence[Row]) -> Plan:
        self._number += 1
        setting = self.SETTINGS[self._number % len(self.SETTINGS)]
        drafts = [row.drafts and (place + self._number) % 3 > 0 for place, row in enumerate(rows)]
        return Plan(setting if any(drafts) else PLAIN, [setting.size if draft else 1 for draft in drafts])


@pytest.mark.parametrize("method", ["coupled", "topk"])
@pytest.mark.parametrize("is_forced", [True, False], ids=["forced", "auto"])
def test_the_text_is_that_of_plain_decoding(tiny, ragged_prompts, method, is_forced):
    """Backlogs of features, rows that draft beside rows that do not, and trees of all sizes change no text of these methods."""
    engine = tiny.engine(method, max_batch=4, seed=5, budget="fixed" if is_forced else "auto")
    if is_forced:
        engine.decoder.budget = ForcedBudget()
    results = run(engine, ragged_prompts, PARAMS)
    plain = run(tiny.engine("off", seed=5), ragged_prompts, PARAMS)
    assert [result.token_ids for result in results] == [result.token_ids for result in plain]
    assert len({cycle.drafted for result in results for cycle in result.cycles}) > 1


@pytest.mark.parametrize("method", ["rheo", "chain", "coupled"])
def test_backlogs_do_not_change_drafts(make_clock, method):
    """A draft that knows the target is right after any number of plain steps."""
    clock = make_clock(list(range(3, 31)))
    engine = clock.engine(method, tree_size=4, depth=3, top_k=2)
    engine.decoder.budget = ForcedBudget()
    engine.decoder.budget.SETTINGS = (PLAIN, PLAIN, Setting(4, 3))
    (result,) = run(engine, [[0]], SamplingParams(temperature=0.0, max_tokens=25))
    assert {cycle.accepted for cycle in result.cycles[:-1]} <= {0, 2, 3}
    assert all(cycle.accepted == cycle.depth for cycle in result.cycles[:-1])


def test_reproducible_is_fixed_and_told(tiny, caplog):
    engine = tiny.engine("rheo", budget="auto", reproducible=True)
    assert engine.speculation.budget == "fixed"
    assert "budget is fixed" in caplog.text


def test_grid():
    assert grid(Speculation(tree_size=8, depth=3)) == [(2, 1), (4, 1), (4, 2), (4, 3), (8, 1), (8, 2), (8, 3)]
    assert grid(Speculation(method="chain", tree_size=4, depth=8)) == [(2, 1), (3, 2), (4, 3)]
    assert grid(Speculation(method="static", tree_size=8, depth=3)) == [(2, 1), (4, 3), (8, 3)]
    assert max(grid(Speculation(tree_size=60, depth=8))) == (60, 8)


def test_curve():
    curve = Curve()
    for _ in range(40):
        for number in (1, 8, 64):
            curve.learn([number], 1 + 0.1 * number)
    assert [curve(number) for number in (1, 8, 20, 64, 128)] == pytest.approx([1.1, 1.8, 3.0, 7.4, 13.8], rel=0.01)


@pytest.mark.parametrize("method", ["topk", "coupled"])
def test_smaller_trees_are_known_from_larger_ones(tiny, ragged_prompts, monkeypatch, method):
    """What each smaller tree would have had accepted is what it has accepted, from the same state and with the same noise."""
    from engine import cycle, drafting
    from engine.law import verification

    num_parts = 0
    settings = grid(Speculation(tree_size=20, depth=3, top_k=4))
    seen, num_checked = [], []

    def keep_pool(pool, size_B, max_size, target_token_V):
        tree = prune(pool, size_B, max_size, target_token_V)
        seen.append((pool, size_B, target_token_V))
        return tree

    def verify(tree, laws, *args):
        nonlocal num_parts
        verdict = verification.verify(tree, laws, *args)
        if seen and tree.max_depth:
            pool, size_B, target_token_V = seen.pop()
            if len(size_B) < len(verdict.token_BL):  # a row at the end reads its prompt
                return verdict
            num_checked.append(len(size_B))
            known = accepted_within(tree, verdict, settings)
            path = verdict.token_BL
            for column, (size, depth) in enumerate(settings):
                score_BP = pool.score_BP.masked_fill(pool.level_P > depth, -torch.inf)
                smaller = prune(type(pool)(**{**vars(pool), "score_BP": score_BP}), size_B.clamp(max=size), size, target_token_V)
                for row in range(len(path)):
                    node, length = 0, 0
                    for token in path[row].tolist():
                        children = (smaller.exists_BR[row] & (smaller.parent_BR[row] == node) & (smaller.token_BR[row] == token)).clone()
                        children[0] = False
                        if token < 0 or not children.any():
                            break
                        node, length = int(children.long().argmax()), length + 1
                    is_part = int((tree.exists_BR[row] & (tree.depth_BR[row] <= depth)).sum()) >= int(smaller.size_B[row])
                    assert int(known[row, column]) == length if is_part else int(known[row, column]) <= length
                    num_parts += is_part
        return verdict

    monkeypatch.setattr(drafting, "prune", keep_pool)
    monkeypatch.setattr(cycle, "verify", verify)
    run(tiny.engine(method, tree_size=20, depth=3, max_batch=4), ragged_prompts, PARAMS)
    assert sum(num_checked) > 50 and num_parts > 5 * sum(num_checked)
