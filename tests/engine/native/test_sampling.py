"""Laws and draws of the kernels against torch's, and the law of the draws themselves."""

import pytest
import torch
from scipy.stats import chi2

from engine.law import probabilities
from engine.law.draws import KeyedDraws
from engine.law.keys import fold, gumbel, row_key
from engine.native.sampling import NativeDraws, softmax_at
from tests.kernels import needs_kernels

pytestmark = needs_kernels

INF, NAN = torch.inf, torch.nan
NUM_ROWS = 200_000


def keys(num_rows: int) -> torch.Tensor:
    return torch.tensor([row_key(0, str(row), 0) for row in range(num_rows)])


@pytest.mark.parametrize("vocab", (1, 15, 16, 17, 32, 1000, 49_152))
def test_the_softmax_is_torchs(vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(40, vocab, generator=generator) * 8
    logits = logits.masked_fill(torch.rand(40, vocab, generator=generator) < 0.1, -INF)
    temperature = torch.linspace(0.05, 3, 40)
    found, expected = softmax_at(logits, temperature), probabilities.softmax_at(logits, temperature)
    torch.testing.assert_close(found, expected, rtol=3e-6, atol=1e-30)
    torch.testing.assert_close(found.double().sum(-1), expected.double().sum(-1), rtol=0, atol=2e-6)


def test_rows_without_a_law_become_zeros():
    logits = torch.zeros(5, 20)
    logits[0], logits[1, 7], logits[2, 3], logits[3, 1] = -INF, INF, NAN, -INF
    expected = probabilities.softmax_at(logits, torch.ones(5))
    assert torch.equal(softmax_at(logits, torch.ones(5)), expected)
    assert expected.sum(-1).tolist() == pytest.approx([0, 0, 0, 1, 1])


def test_a_row_at_temperature_zero_leaves_its_neighbours_alone():
    logits = torch.randn(3, 4000, generator=torch.Generator().manual_seed(0))
    found = softmax_at(logits, torch.tensor([1.0, 0.0, 0.5]))
    assert torch.equal(found[[0, 2]], softmax_at(logits[[0, 2]], torch.tensor([1.0, 0.5])))
    assert torch.equal(found[1], torch.nn.functional.one_hot(logits[1].argmax(), 4000).float())


def test_double_precision_is_left_to_torch():
    assert softmax_at(torch.randn(3, 9).double(), torch.ones(3)).dtype == torch.float64


@pytest.mark.parametrize("vocab", (3, 16, 33, 49_152))
def test_a_token_is_the_one_that_torch_draws(vocab):
    """But where two scores are equal within rounding."""
    num_rows = 200 if vocab > 1000 else 20_000
    p_BV = (torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(1)) * 3).softmax(-1)
    key_B, active_B, position_B = keys(num_rows), torch.ones(num_rows).bool(), torch.arange(num_rows) % 50
    found, expected = (draws(key_B).token(p_BV, active_B, position_B) for draws in (NativeDraws, KeyedDraws))
    score_BV = p_BV.double().log() + KeyedDraws(key_B).noise(position_B, vocab).double()
    chosen, best = (score_BV.gather(1, token.unsqueeze(-1)) for token in (found, expected))
    assert ((best - chosen).abs() < 1e-5).all()
    assert (found == expected).double().mean() > 0.999


def test_tokens_have_the_law_of_their_probabilities():
    p_V = torch.tensor([0.0, 0.3, 0.0, 0.1, 1e-4, 0.0, 0.5999, 0.0])
    token_B = NativeDraws(keys(NUM_ROWS)).token(p_V.expand(NUM_ROWS, 8), torch.ones(NUM_ROWS).bool(), torch.full((NUM_ROWS,), 5))
    count = torch.bincount(token_B, minlength=8).double()
    assert count[p_V == 0].sum() == 0
    expected = NUM_ROWS * p_V[p_V > 0].double()
    assert float(((count[p_V > 0] - expected) ** 2 / expected).sum()) < chi2.isf(1e-6, 3)


def test_a_rare_token_is_drawn_at_its_own_rate():
    """A thousand tokens of 1e-6 each (LAW.md section 7, Resolution)."""
    p_V = torch.full((1001,), 1e-6)
    p_V[0] = 1 - 1e-3
    token_B = NativeDraws(keys(NUM_ROWS)).token(p_V.expand(NUM_ROWS, -1), torch.ones(NUM_ROWS).bool(), torch.zeros(NUM_ROWS).long())
    rare = int((token_B > 0).sum())
    assert abs(rare - NUM_ROWS * 1e-3) < 5 * (NUM_ROWS * 1e-3) ** 0.5
    assert len(token_B[token_B > 0].unique()) > 0.8 * rare


def unmix(x: int) -> int:
    """The number whose `engine.law.keys.mix` is x; both without a sign."""
    for shift, factor in ((31, 1), (27, 0x94D049BB133111EB), (30, 0xBF58476D1CE4E5B9)):
        x = x * pow(factor, -1, 2**64) % 2**64
        x ^= x >> shift ^ x >> 2 * shift
    return x


def test_the_largest_noise_is_what_its_cell_says():
    """Cells near 0 are what a rare token wins with: fp32 rounds 1 - v to 1 there, and log1p may not."""
    token, cells = 2, [0, 1, 77, 2**20, 2**28 + 1, 2**32]
    keys_B = []
    for cell in cells:
        base = (unmix(cell << 12) - (token + 1) * 0x9E3779B97F4A7C15) % 2**64
        key = base ^ base >> 32
        keys_B.append(key - 2**64 if key >= 2**63 else key)

    class Fixed(NativeDraws):
        def key(self, *_) -> torch.Tensor:
            return self._row_key_B

    key_B = torch.tensor(keys_B)
    noise_BV = gumbel(fold(key_B.unsqueeze(-1), torch.arange(4)))
    expected = -((torch.tensor(cells).double() + 0.5) * 2.0**-52).log()
    torch.testing.assert_close(noise_BV[:, token].double(), expected, rtol=1e-6, atol=1e-6)
    # just enough for the rare token to win against the largest of the others, and just too little
    others = noise_BV[:, [0, 1, 3]].amax(-1)
    for margin, wins in ((1e-3, True), (-1e-3, False)):
        p_BV = torch.ones(len(cells), 4)
        p_BV[:, token] = (others - noise_BV[:, token] + margin).exp()
        token_B = Fixed(key_B).token(p_BV, torch.ones(len(cells)).bool(), torch.zeros(len(cells)).long())
        assert ((token_B == token) == wins).all()


def test_equal_scores_give_the_smallest_token():
    token_B = NativeDraws(keys(4)).token(torch.zeros(4, 40), torch.zeros(4).bool(), torch.zeros(4).long())
    assert token_B.tolist() == [0] * 4
