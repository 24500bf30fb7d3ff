"""Each step between a layer's products against transformers' own, to the last bit of bf16 or the one before it."""

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from engine.native.layers import add_norm, rotate, silu_mul
from tests.kernels import needs_kernels

pytestmark = needs_kernels

ULP = 2.0**-7  # of bf16, relative


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for a few roundings that fall on the other side."""
    torch.testing.assert_close(found, expected, rtol=ULP, atol=1e-6)
    assert (found == expected).double().mean() > 0.98


@pytest.mark.parametrize("num_tokens", (1, 3, 50))
@pytest.mark.parametrize("has_delta", (False, True))
def test_add_norm(num_tokens, has_delta):
    x, delta = randn(num_tokens, 576) * 5, randn(num_tokens, 576, seed=1) if has_delta else None
    norm = LlamaRMSNorm(576, eps=1e-5).bfloat16()
    norm.weight.data = randn(576, seed=2)
    total = x + delta if has_delta else x.clone()
    found = add_norm(x, delta, norm.weight, 1e-5)
    assert torch.equal(x, total)
    check(found, norm(total))


@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("has_norm", (False, True))
def test_rotate_inside_a_wider_tensor(head_dim, has_norm):
    whole = randn(20, 7, head_dim)
    before = whole.clone()
    angle = torch.rand(20, head_dim, generator=torch.Generator().manual_seed(3)) * 6
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    norm = LlamaRMSNorm(head_dim, eps=1e-6).bfloat16()
    norm.weight.data = randn(head_dim, seed=4)
    x = norm(before[:, 2:5]) if has_norm else before[:, 2:5]
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos[None], sin[None])
    rotate(whole[:, 2:5], cos, sin, *((norm.weight, 1e-6) if has_norm else ()))
    check(whole[:, 2:5], expected[0].transpose(0, 1))
    assert torch.equal(whole[:, :2], before[:, :2]) and torch.equal(whole[:, 5:], before[:, 5:])


def test_silu_mul():
    x = randn(30, 96) * 8
    x[0, :4] = torch.tensor([0.0, -0.0, 300.0, -300.0])
    gate, up = x.chunk(2, -1)
    check(silu_mul(x), ACT2FN["silu"](gate) * up)
