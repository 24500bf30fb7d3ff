"""Draws whose work over the whole vocabulary is done by the kernels (sampling.cpp), and the law they draw from."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.law import probabilities
from engine.law.draws import KeyedDraws, Purpose
from engine.native.build import load_kernels


class NativeDraws(KeyedDraws):
    """`KeyedDraws` on a CPU. The noise is the same function of the key; a token that it draws can differ from torch's at a near tie."""

    def token(self, p_BV: Tensor, active_B: Tensor, position_B: Tensor) -> Tensor:
        if p_BV.dtype != torch.float32:
            return super().token(p_BV, active_B, position_B)
        p_BV = p_BV.contiguous()
        key_B = self.key(1, Purpose.NOISE, position_B).contiguous()
        token_B = torch.empty(len(p_BV), dtype=torch.int64)
        load_kernels().rheo_token(
            p_BV.data_ptr(), p_BV.stride(0), key_B.data_ptr(), token_B.data_ptr(), *p_BV.shape, torch.get_num_threads()
        )
        return token_B


def softmax_at(logits: Tensor, temperature: Tensor) -> Tensor:
    """As `engine.law.probabilities.softmax_at`, and in one pass where logits [B, V] are fp32; a row does not depend on its neighbours."""
    if logits.dtype != torch.float32 or logits.ndim != 2:
        return probabilities.softmax_at(logits, temperature)
    logits, is_greedy_B = logits.contiguous(), temperature <= 0
    divisor_B = torch.where(is_greedy_B, 1, temperature.float())
    p_BV = torch.empty_like(logits)
    load_kernels().rheo_softmax(
        logits.data_ptr(), logits.stride(0), divisor_B.data_ptr(), p_BV.data_ptr(), *logits.shape, torch.get_num_threads()
    )
    if bool(is_greedy_B.any()):
        p_BV[is_greedy_B] = probabilities.softmax_at(logits[is_greedy_B], temperature[is_greedy_B])
    return p_BV
