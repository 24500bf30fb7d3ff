"""The key audit (LAW.md 5.4): a run on the real pair takes down every randomness key it consumes, and DESIGN.md section 7's rules hold."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from engine import Speculation, Verification
from engine.law import growth
from engine.law.draws import KeyedDraws, Purpose
from tests.engine.real_pair import load_real_pair, needs_real_pair, real_requests

pytestmark = needs_real_pair


class _Audit:
    """Keys consumed: how often each (row, purpose, coordinates) was, and how often each 64-bit key."""

    def __init__(self) -> None:
        self.names: Counter[tuple] = Counter()
        self.keys: Counter[int] = Counter()

    def make_draws(self, row_key_B: Tensor) -> KeyedDraws:
        return _AuditedDraws(row_key_B, self)

    def positions(self, row_key: int, purpose: Purpose) -> set[int]:
        return {name[2] for name in self.names if name[0] == row_key and name[1] == purpose}


class _AuditedDraws(KeyedDraws):
    def __init__(self, row_key_B: Tensor, audit: _Audit):
        super().__init__(row_key_B)
        self._audit = audit

    def _take_down(self, active: Tensor, purpose: Tensor | int, *coordinates: Tensor) -> None:
        columns = [
            self._row_key_B.view(-1, *[1] * (active.ndim - 1)),
            torch.as_tensor(int(purpose) if isinstance(purpose, int) else purpose),
        ]
        columns = [column.expand(active.shape)[active].tolist() for column in (*columns, *coordinates)]
        self._audit.names.update(zip(*columns, strict=True))
        self._audit.keys.update(self.key(active.ndim, purpose, *coordinates).expand(active.shape)[active].tolist())

    def categorical(self, weight, active, purpose, *coordinates):
        self._take_down(active, purpose, *coordinates)
        return super().categorical(weight, active, purpose, *coordinates)

    def bernoulli(self, probability, active, purpose, *coordinates):
        self._take_down(active, purpose, *coordinates)
        return super().bernoulli(probability, active, purpose, *coordinates)

    def token(self, p_BV, active_B, position_B):
        self._take_down(active_B, Purpose.NOISE, position_B)
        return super().token(p_BV, active_B, position_B)


def _audited_run(speculation: Speculation):
    audit = _Audit()
    engine = load_real_pair(speculation, max_batch=4)  # fewer slots than rows: slots are refilled
    engine.decoder.make_draws = audit.make_draws
    keys = {}
    prepare = engine.submit

    def submit(request):
        prepare(request)
        row = engine._queue[-1]
        keys[row.request.id] = row.key

    engine.submit = submit
    results = engine.generate(real_requests(max_tokens=12))
    return audit, {result.id: (keys[result.id], result) for result in results}


SPECULATIONS = {
    "rheo": Speculation(method="rheo", tree_size=24, depth=4),
    "rheo m=0": Speculation(method="rheo", m=0, tree_size=24, depth=4),
    "rheo deterministic-first": Speculation(method="rheo", tree_size=24, depth=4, verification=Verification(order="deterministic_first")),
    "static": Speculation(method="static", tree_size=24, depth=4),
    "chain": Speculation(method="chain", tree_size=5, depth=4),
    "coupled": Speculation(method="coupled", tree_size=24, depth=4),
}


@pytest.mark.parametrize("name", SPECULATIONS)
def test_each_key_is_consumed_once(name):
    audit, results = _audited_run(SPECULATIONS[name])
    assert audit.names.total() > 60
    assert max(audit.names.values()) == 1
    assert max(audit.keys.values()) == 1
    for row_key, result in results.values():
        decided = set(range(len(result.token_ids)))
        if name == "coupled":
            assert audit.positions(row_key, Purpose.NOISE) >= decided
            continue
        accept, residual, bonus, lead = (
            audit.positions(row_key, purpose) for purpose in (Purpose.ACCEPT, Purpose.RESIDUAL, Purpose.BONUS, Purpose.LEAD)
        )
        assert accept | bonus | lead >= decided
        assert residual <= accept
        assert not bonus & (accept | lead)
        cycles = {key[2] for key in audit.names if key[0] == row_key and key[1] == Purpose.DRAFT}
        assert cycles == set(range(len(result.cycles)))


def test_draws_shared_by_a_level_are_seen(monkeypatch):
    monkeypatch.setattr(growth, "fold", lambda path, slot: path + 1)
    audit, _ = _audited_run(SPECULATIONS["rheo"])
    assert max(audit.names.values()) > 1
