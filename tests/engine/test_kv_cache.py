"""The cache keeps what it was given, through compaction, and where a row's pages are cleared."""

from __future__ import annotations

import pytest
import torch

from engine.kv_cache import KVCache
from engine.pages import PAGE


def filled_cache(num_pages: int = 4) -> KVCache:
    cache = KVCache(num_layers=2, num_kv_heads=2, head_dim=4, dtype=torch.float32, device=torch.device("cpu"))
    cache.reserve(num_pages)
    generator = torch.Generator().manual_seed(0)
    cache.key.normal_(generator=generator)
    cache.value.normal_(generator=generator)
    return cache


def test_bytes_per_token_is_what_a_place_takes():
    cache = filled_cache()
    assert cache.bytes_per_token * 4 * PAGE == cache.key.nbytes + cache.value.nbytes


def test_write_goes_to_its_layer_page_and_offset():
    cache = filled_cache()
    key, value = cache.key.clone(), cache.value.clone()
    new_key, new_value = torch.arange(16.0).view(2, 2, 4), -torch.arange(16.0).view(2, 2, 4)
    cache.write(1, torch.tensor([2 * PAGE + 7, 3]), new_key, new_value)
    key[1, 2, :, 7], key[1, 0, :, 3] = new_key
    value[1, 2, :, 7], value[1, 0, :, 3] = new_value
    assert torch.equal(cache.key, key) and torch.equal(cache.value, value)


def test_gather_reads_pages_in_the_rows_order():
    cache = filled_cache()
    found = cache.gather(1, torch.tensor([[3, 0], [1, 2]]), 70)
    for stored, gathered in zip((cache.key, cache.value), found, strict=True):
        for row, (first, second) in enumerate([(3, 0), (1, 2)]):
            assert torch.equal(gathered[row], torch.cat([stored[1, first], stored[1, second, :, :6]], 1))


def test_move_reads_before_it_writes():
    """Accepted nodes 2, 3, 5 of page 0 become places 1, 2, 3: source 3 is also a target. A token goes from page 2 to page 1 besides."""
    cache = filled_cache()
    before = cache.key.clone(), cache.value.clone()
    sources, targets = [(0, 2), (0, 3), (0, 5), (2, 9)], [(0, 1), (0, 2), (0, 3), (1, 63)]
    cache.move(*(torch.tensor([page * PAGE + offset for page, offset in places]) for places in (sources, targets)))
    for stored, old in zip((cache.key, cache.value), before, strict=True):
        expected = old.clone()
        for (source_page, source), (page, offset) in zip(sources, targets, strict=True):
            expected[:, page, :, offset] = old[:, source_page, :, source]
        assert torch.equal(stored, expected)


@pytest.mark.parametrize("start, kept", [(0, (0, 0, 0)), (5, (5, 0, 0)), (64, (64, 0, 0)), (70, (64, 6, 0)), (192, (64, 64, 64))])
def test_clear_begins_within_a_page(start, kept):
    cache = filled_cache()
    before = cache.key.clone(), cache.value.clone()
    cache.clear([3, 0, 2], start)
    for stored, old in zip((cache.key, cache.value), before, strict=True):
        expected = old.clone()
        for page, length in zip((3, 0, 2), kept, strict=True):
            expected[:, page, :, length:] = 0
        assert torch.equal(stored, expected)
