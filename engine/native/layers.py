"""What stands between a layer's matrix products (layers.cpp). All tensors are bf16 on the CPU; sizes are multiples of 16."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.native.build import load_kernels


def add_norm(x_NH: Tensor, delta_NH: Tensor | None, weight_H: Tensor, eps: float) -> Tensor:
    """Adds delta to x in place, and returns Llama's RMSNorm of the sum [N, H]."""
    assert x_NH.is_contiguous() and (delta_NH is None or delta_NH.is_contiguous())
    out_NH = torch.empty_like(x_NH)
    delta = None if delta_NH is None else delta_NH.data_ptr()
    load_kernels().rheo_add_norm(x_NH.data_ptr(), delta, weight_H.data_ptr(), out_NH.data_ptr(), *x_NH.shape, eps, torch.get_num_threads())
    return out_NH


def rotate(x_NAD: Tensor, cos_ND: Tensor, sin_ND: Tensor, norm_D: Tensor | None = None, eps: float = 0.0) -> None:
    """Llama's rotary positions, in place, after a norm of each head where there is one. The heads of a token lie side by side."""
    num_tokens, heads, head_dim = x_NAD.shape
    assert x_NAD.stride()[1:] == (head_dim, 1) and cos_ND.is_contiguous() and sin_ND.is_contiguous()
    norm = None if norm_D is None else norm_D.data_ptr()
    load_kernels().rheo_rotate(
        x_NAD.data_ptr(),
        x_NAD.stride(0),
        cos_ND.data_ptr(),
        sin_ND.data_ptr(),
        norm,
        eps,
        num_tokens,
        heads,
        head_dim,
        torch.get_num_threads(),
    )


def silu_mul(x_N2M: Tensor) -> Tensor:
    """silu(gate) * up [N, M], of both side by side."""
    assert x_N2M.is_contiguous()
    num_tokens, size = x_N2M.shape[0], x_N2M.shape[1] // 2
    out_NM = x_N2M.new_empty(num_tokens, size)
    load_kernels().rheo_silu_mul(x_N2M.data_ptr(), out_NM.data_ptr(), num_tokens, size, torch.get_num_threads())
    return out_NM
