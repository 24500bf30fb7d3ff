"""The cache keeps what it was given, through growth, compaction and moves between slots."""

from __future__ import annotations

import torch

from engine.kv_cache import KVCache


def filled_cache(num_slots: int = 3, capacity: int = 20) -> KVCache:
    cache = KVCache(num_layers=2, num_kv_heads=2, head_dim=4, dtype=torch.float32, device=torch.device("cpu"))
    cache.reserve(num_slots, capacity)
    generator = torch.Generator().manual_seed(0)
    cache.key.normal_(generator=generator)
    cache.value.normal_(generator=generator)
    return cache


def test_reserve_keeps_what_is_stored():
    cache = filled_cache()
    key, value = cache.key.clone(), cache.value.clone()
    for num_slots, capacity in ((3, 100), (5, 10), (2, 200), (1, 1)):
        cache.reserve(num_slots, capacity)
        assert torch.equal(cache.key[:, :3, :, : key.shape[3]], key)
        assert torch.equal(cache.value[:, :3, :, : key.shape[3]], value)
    assert cache.key.shape[1] >= 5 and cache.key.shape[3] >= 200
    assert cache.key.shape == cache.value.shape


def test_new_places_are_finite():
    """A masked place still takes part in attention with weight 0, and 0 * NaN would be NaN."""
    cache = filled_cache()
    cache.reserve(6, 300)
    assert bool(cache.key.isfinite().all()) and bool(cache.value.isfinite().all())


def test_bytes_per_token_is_what_a_place_takes():
    cache = filled_cache()
    num_places = cache.key.shape[1] * cache.key.shape[3]
    assert cache.bytes_per_token * num_places == cache.key.nbytes + cache.value.nbytes


def test_write_goes_to_its_layer_slot_and_place():
    cache = filled_cache()
    key, value = cache.key.clone(), cache.value.clone()
    new_key, new_value = torch.arange(16.0).view(2, 2, 4), -torch.arange(16.0).view(2, 2, 4)
    cache.write(1, torch.tensor([2, 0]), torch.tensor([7, 3]), new_key, new_value)
    key[1, 2, :, 7], key[1, 0, :, 3] = new_key
    value[1, 2, :, 7], value[1, 0, :, 3] = new_value
    assert torch.equal(cache.key, key) and torch.equal(cache.value, value)


def test_move_reads_before_it_writes():
    """Accepted nodes 2, 3, 5 of slot 0 become places 1, 2, 3: source 3 is also a target. Slot 2 moves in the same call."""
    cache = filled_cache()
    before = cache.key.clone(), cache.value.clone()
    slots, sources, targets = [0, 0, 0, 2], [2, 3, 5, 9], [1, 2, 3, 4]
    cache.move(torch.tensor(slots), torch.tensor(sources), torch.tensor(targets))
    for stored, old in zip((cache.key, cache.value), before, strict=True):
        expected = old.clone()
        for slot, source, target in zip(slots, sources, targets, strict=True):
            expected[:, slot, :, target] = old[:, slot, :, source]
        assert torch.equal(stored, expected)


def test_copy_slot_copies_that_many_tokens():
    cache = filled_cache()
    before = cache.key.clone(), cache.value.clone()
    cache.copy_slot(2, 0, 11)
    for stored, old in zip((cache.key, cache.value), before, strict=True):
        assert torch.equal(stored[:, 0, :, :11], old[:, 2, :, :11])
        assert torch.equal(stored[:, 1:], old[:, 1:])
