"""Which prompts are for validation: decided by the prompt itself, so that all its answers are on one side, on every run."""

from __future__ import annotations

import hashlib

import numpy as np

_RANGE = 1 << 20


def hash_prompt(prompt: str) -> int:
    """From 0 to 2^20 - 1."""
    return int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=8).digest()) % _RANGE


def is_held_out(prompt_hash: int | np.ndarray, share: float) -> bool | np.ndarray:
    return prompt_hash < share * _RANGE
