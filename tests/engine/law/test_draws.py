"""Keys and the draws that they drive."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy.stats import chi2

from engine.law.draws import KeyedDraws, Purpose, smallest_argmax
from engine.law.keys import fold, gumbel, mix, row_key, uniform

NUM_ROWS = 200_000


def keyed(num_rows: int = NUM_ROWS) -> KeyedDraws:
    return KeyedDraws(torch.tensor([row_key(0, str(row), 0) for row in range(num_rows)]))


def is_flat(count: torch.Tensor, expected: torch.Tensor | float) -> bool:
    """Chi-square below the quantile that a right law exceeds once in a million."""
    statistic = float(((count - expected) ** 2 / expected).sum())
    return statistic < chi2.isf(1e-6, count.numel() - 1)


def test_uniform_is_inside_the_unit_interval():
    key = torch.tensor([0, -1, 2**63 - 1, -(2**63), 4095, 4096])
    u = uniform(key)
    assert u.dtype == torch.float64
    assert bool((u > 0).all()) and bool((u < 1).all())
    assert u[0] == 0.5 * 2.0**-52 and u[1] == 1 - 0.5 * 2.0**-52  # the first and the last cell


def test_uniform_is_flat():
    u = uniform(fold(torch.tensor(row_key(0, "a", 0)), torch.arange(NUM_ROWS)))
    assert is_flat(torch.histc(u, 1000, 0, 1), NUM_ROWS / 1000)
    low_bits = (u * 2.0**52).long() % 256  # of the grid, beyond what fp32 would carry
    assert is_flat(torch.bincount(low_bits, minlength=256).double(), NUM_ROWS / 256)


@pytest.mark.parametrize(
    "other",
    [("seed", (1, "a", 0)), ("sample", (0, "a", 1)), ("id", (0, "b", 0))],
    ids=lambda other: other[0],
)
def test_neighbouring_rows_are_independent(other):
    """Pairs of uniforms of the same coordinates fill the unit square evenly."""
    position = torch.arange(NUM_ROWS)
    pair = [uniform(fold(fold(torch.tensor(row_key(*name)), Purpose.ACCEPT), position)) for name in ((0, "a", 0), other[1])]
    cell = (pair[0] * 20).long() * 20 + (pair[1] * 20).long()
    assert is_flat(torch.bincount(cell, minlength=400).double(), NUM_ROWS / 400)


@pytest.mark.parametrize("step", [(1, 0), (0, 1), (1, 1)], ids=("next position", "next purpose", "both"))
def test_neighbouring_coordinates_are_independent(step):
    draws, position_B = keyed(), torch.full((NUM_ROWS,), 7)
    pair = [uniform(draws.key(1, purpose, position)) for purpose, position in ((1, position_B), (1 + step[1], position_B + step[0]))]
    cell = (pair[0] * 20).long() * 20 + (pair[1] * 20).long()
    assert is_flat(torch.bincount(cell, minlength=400).double(), NUM_ROWS / 400)


def test_keys_do_not_collide():
    """Purposes, cycles or positions, slot paths to depth 4, and ranks, all distinct; and (a, b) is not (b, a)."""
    draws = KeyedDraws(torch.tensor([row_key(0, "a", 0)]))
    keys = [draws.key(1, purpose, torch.arange(2000)) for purpose in Purpose if purpose != Purpose.DRAFT]
    path = [torch.zeros(1, dtype=torch.long)]
    for _ in range(4):
        path.append(fold(path[-1].unsqueeze(1), torch.arange(10)).flatten())
    keys += [draws.key(2, Purpose.DRAFT, torch.arange(20).unsqueeze(1), p.unsqueeze(0)).flatten() for p in path]
    ranks = torch.arange(10).unsqueeze(1)
    keys += [draws.key(3, Purpose.DRAFT, torch.arange(20).view(-1, 1, 1), p, ranks).flatten() for p in path[:3]]
    keys.append(draws.key(2, Purpose.ACCEPT, torch.arange(2000), ranks).flatten())
    keys.append(fold(draws.key(1, Purpose.NOISE, torch.arange(40)).unsqueeze(1), torch.arange(5000)).flatten())
    every = torch.cat([key.flatten() for key in keys])
    assert len(every.unique()) == len(every) > 400_000


def test_row_keys_do_not_collide():
    numbers = (0, 1, 10, 11, 101)  # that run into one another when nothing separates them
    names = list(itertools.product(numbers, [str(i) for i in range(2000)] + ["1\x1f1", "", "\ud800"], numbers))
    assert len({row_key(*name) for name in names}) == len(names)
    assert row_key(0, "1", 2) == row_key(0, "1", 2)
    assert row_key(0, "1\x1f2", 3) != row_key(0, "2", 31)


def test_mix_is_a_bijection_that_spreads_bits():
    x = torch.arange(NUM_ROWS)
    assert len(mix(x).unique()) == NUM_ROWS
    flips = mix(x) ^ mix(x ^ 1)
    share = sum(((flips >> bit) & 1).double().mean() for bit in range(64)) / 64
    assert abs(float(share) - 0.5) < 0.01


def test_same_coordinates_same_draw_in_any_batch():
    draws, alone = keyed(50), KeyedDraws(torch.tensor([row_key(0, "31", 0)]))
    weight_BV = torch.rand(50, 9, generator=torch.Generator().manual_seed(1))
    active_B, position_B = torch.ones(50).bool(), torch.full((50,), 3)
    together = draws.categorical(weight_BV, active_B, Purpose.BONUS, position_B)
    assert together[31] == alone.categorical(weight_BV[31:32], active_B[:1], Purpose.BONUS, position_B[:1])[0]
    assert torch.equal(draws.noise(position_B, 9)[31:32], alone.noise(position_B[:1], 9))
    assert torch.equal(draws.noise(position_B, 9), draws.noise(position_B, 12)[:, :9])  # whatever the vocabulary is padded to


def test_categorical_has_the_weights_law():
    weight = torch.tensor([0.0, 3.0, 0.0, 1.0, 1e-3, 0.0, 6.0, 0.0])
    index = keyed().categorical(weight.expand(NUM_ROWS, 8), torch.ones(NUM_ROWS).bool(), Purpose.DRAFT, torch.zeros(NUM_ROWS).long())
    count = torch.bincount(index, minlength=8).double()
    possible = weight > 0
    assert count[~possible].sum() == 0
    assert is_flat(count[possible], NUM_ROWS * (weight / weight.sum())[possible].double())


class FixedDraws(KeyedDraws):
    """The key itself comes from the test: its first 52 bits are the uniform's cell."""

    def __init__(self, cell_B: torch.Tensor):
        super().__init__(cell_B << 12)

    def key(self, ndim: int, *_) -> torch.Tensor:
        return self._row_key_B.view(-1, *[1] * (ndim - 1))


@pytest.mark.parametrize("cell", (0, 2**52 - 1), ids=("first cell", "last cell"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_no_outcome_without_probability(cell, dtype):
    """At both ends of the grid, whatever the total rounds to."""
    generator = torch.Generator().manual_seed(2)
    weight_BV = torch.rand(20_000, 12, generator=generator, dtype=dtype) * (torch.rand(20_000, 12, generator=generator) < 0.4)
    weight_BV[:, 5] += 1e-30
    draws, active_B = FixedDraws(torch.full((20_000,), cell)), torch.ones(20_000).bool()
    index_B = draws.categorical(weight_BV, active_B, 0)
    assert bool((weight_BV.gather(1, index_B.unsqueeze(1)) > 0).all())
    assert not draws.bernoulli(torch.zeros(20_000), active_B, 0).any()
    assert draws.bernoulli(torch.ones(20_000), active_B, 0).all()


def test_bernoulli_has_its_rate():
    probability = torch.linspace(0, 1, 5).repeat(NUM_ROWS // 5)
    happened = keyed().bernoulli(probability, torch.ones(NUM_ROWS).bool(), Purpose.ACCEPT, torch.zeros(NUM_ROWS).long())
    rate = happened.double().view(-1, 5).mean(0)
    assert rate[0] == 0 and rate[4] == 1
    assert ((rate - torch.linspace(0, 1, 5)).abs() < 5 * 0.5 / (NUM_ROWS / 5) ** 0.5).all()


def test_shapes():
    draws, cycle_B1, path_BF = keyed(4), torch.zeros(4, 1).long(), torch.arange(12).view(4, 3)
    index = draws.categorical(torch.rand(4, 3, 7), torch.ones(4, 3).bool(), Purpose.DRAFT, cycle_B1, path_BF)
    assert index.shape == (4, 3) and index.dtype == torch.long
    assert draws.bernoulli(torch.rand(4), torch.ones(4).bool(), torch.full((4,), 2), torch.arange(4)).shape == (4,)
    assert draws.noise(torch.arange(4), 7).shape == (4, 7)
    assert draws.token(torch.rand(4, 7), torch.ones(4).bool(), torch.arange(4)).shape == (4,)
    # nodes of one row that differ in their path draw apart; the key of a purpose given as a tensor is that of the number
    assert len(uniform(draws.key(2, Purpose.DRAFT, cycle_B1, path_BF)).unique()) == 12
    assert torch.equal(draws.key(1, 2, torch.arange(4)), draws.key(1, torch.full((4,), 2), torch.arange(4)))


def test_smallest_argmax():
    assert smallest_argmax(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [-torch.inf, -torch.inf, 0.0]])).tolist() == [1, 0, 2]
    assert 0 <= smallest_argmax(torch.tensor([torch.nan, 1.0, 2.0])) < 3


def test_noise_is_gumbel():
    g = gumbel(fold(torch.tensor(row_key(3, "g", 0)), torch.arange(NUM_ROWS))).double()
    cell = (torch.exp(-torch.exp(-g)) * 100).long()  # its own distribution function makes it uniform
    assert is_flat(torch.bincount(cell, minlength=100).double(), NUM_ROWS / 100)
