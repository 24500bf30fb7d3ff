"""Counter-based randomness: a key is a 64-bit integer, and a uniform is a pure function of it (DESIGN.md section 7).

Keys are folded with the splitmix64 finaliser (Steele, Lea and Flood, OOPSLA 2014), written on int64 tensors, whose products wrap as the
unsigned ones do. No generator has a state: the same coordinates give the same number on any machine, in any batch.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's `>>` on int64 keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser, a bijection of int64 whose output bits each depend on every input bit."""
    x = (x ^ _shift_right(x, 30)) * _FIRST
    x = (x ^ _shift_right(x, 27)) * _SECOND
    return x ^ _shift_right(x, 31)


def fold(key: Tensor, coordinate: Tensor | int) -> Tensor:
    """The key one coordinate further; for one key, different coordinates give different keys."""
    coordinate = torch.as_tensor(coordinate, dtype=torch.long, device=key.device)
    return mix((key ^ _shift_right(key, 32)) + (coordinate + 1) * _GOLDEN)


def row_key(seed: int, id: str, sample: int) -> int:
    """The key of a row's attempt, from everything that names it: a signed 64-bit integer."""
    name = f"{seed}\x1f{sample}\x1f{id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little", signed=True)


def uniform(key: Tensor) -> Tensor:
    """Float64 in (0, 1): the centres of 2^52 cells, so that neither end is ever reached."""
    return (_shift_right(key, 12).double() + 0.5) * 2.0**-52


def gumbel(key: Tensor) -> Tensor:
    """Standard Gumbel noise, fp32, -log(-log u) with u = 1 - v.

    v = (k + 1/2) / 2^52 keeps its relative precision near 0, where the largest noise comes from, so a token of probability 1e-8 is still
    drawn at its own rate (LAW.md section 7, Resolution).
    """
    v = ((_shift_right(key, 12).to(torch.float32) + 0.5) * 2.0**-52).clamp_(max=1 - 2.0**-24)
    return v.neg_().log1p_().neg_().log_().neg_()
