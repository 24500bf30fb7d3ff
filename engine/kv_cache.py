"""Keys and values of the running rows: one slot a row, tokens in order, rejected drafts overwritten by the next write.

A slot holds a committed prefix, then whatever the running forward pass put behind it. What lies behind the prefix is never attended,
because every mask is made from the prefix's length; it is cleared only where it is not finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 64


def round_up(capacity: int) -> int:
    """Capacities are whole blocks, so that a cache does not grow with every row that is a little longer."""
    return -(-capacity // _BLOCK) * _BLOCK


class KVCache:
    """Keys and values [layers, slots, kv_heads, capacity, head_dim], grown on demand."""

    def __init__(self, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device):
        self._shape = (num_layers, num_kv_heads, head_dim)
        empty = torch.zeros(num_layers, 0, num_kv_heads, 0, head_dim, dtype=dtype, device=device)
        self.key, self.value = empty, empty.clone()

    @property
    def bytes_per_token(self) -> int:
        num_layers, num_kv_heads, head_dim = self._shape
        return 2 * num_layers * num_kv_heads * head_dim * self.key.element_size()

    def reserve(self, num_slots: int, capacity: int, max_places: int | None = None) -> None:
        """Make room for `num_slots` rows of `capacity` tokens; what these slots hold stays.

        max_places: slots * capacity at most. Where growing would exceed it, the cache is made just as large as is asked for.
        """
        num_layers, old_slots, num_kv_heads, old_capacity, head_dim = self.key.shape
        slots, places = max(num_slots, old_slots), max(round_up(capacity), old_capacity)
        if max_places is not None and slots * places > max_places:
            slots, places = num_slots, round_up(capacity)
        if (slots, places) == (old_slots, old_capacity):
            return
        kept_slots, kept_places = min(slots, old_slots), min(places, old_capacity)
        for name in ("key", "value"):
            resized = self.key.new_zeros(num_layers, slots, num_kv_heads, places, head_dim)
            resized[:, :kept_slots, :, :kept_places] = getattr(self, name)[:, :kept_slots, :, :kept_places]
            setattr(self, name, resized)

    def write(self, layer: int, slot_N: Tensor, place_N: Tensor, key_NKD: Tensor, value_NKD: Tensor) -> None:
        self.key[layer][slot_N, :, place_N] = key_NKD
        self.value[layer][slot_N, :, place_N] = value_NKD

    def move(self, slot_T: Tensor, source_T: Tensor, target_T: Tensor) -> None:
        """Within slots, tokens from places `source_T` to `target_T`, in all layers; all is read before anything is written."""
        for stored in (self.key, self.value):
            stored[:, slot_T, :, target_T] = stored[:, slot_T, :, source_T]

    def copy_slot(self, source: int, target: int, num_tokens: int) -> None:
        for stored in (self.key, self.value):
            stored[:, target, :, :num_tokens] = stored[:, source, :, :num_tokens]

    def clear_slot(self, slot: int, start: int = 0) -> None:
        """Needed from where keys or values were not finite: a mask hides numbers, but 0 * NaN is NaN."""
        for stored in (self.key, self.value):
            stored[:, slot, :, start:] = 0
