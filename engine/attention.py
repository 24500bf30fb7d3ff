"""Attention of packed new tokens: each row's committed prefix, plus a masked region of this cycle's tokens (a tree, or a causal run).

`AttentionPass` is one forward pass's attention over all layers. A backend is a class with its constructor and `__call__`; sdpa works on any
device, and others can join behind the same interface.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.errors import UserError
from engine.kv_cache import KVCache
from engine.native.attention import NativePass, why_not_native
from engine.new_tokens import NewTokens
from engine.pages import find_addresses


class SdpaPass:
    """torch's scaled_dot_product_attention, rows padded to the largest count; long prompts one by one.

    Query heads that share a key head are folded into the query axis, which reads each key once. The rows' pages are gathered before: no
    operation of torch reads keys page by page.
    """

    def __init__(self, cache: KVCache, new: NewTokens):
        self._cache = cache
        num_rows, num_queries, width = new.visible_BQW.shape
        device = new.prefix_B.device
        query_Q = torch.arange(num_queries, device=device)
        is_query_BQ = query_Q < new.count_B.unsqueeze(-1)
        self._packed_BQ = torch.where(is_query_BQ, new.start_B.unsqueeze(-1) + query_Q, 0)
        self._padded_index_N = is_query_BQ.flatten().nonzero().squeeze(1)
        row_BQ = torch.arange(num_rows, device=device).unsqueeze(-1).expand(-1, num_queries)
        place_BQ = new.prefix_B.unsqueeze(-1) + new.offset + query_Q
        numbers, places = [row_BQ[is_query_BQ]], [place_BQ[is_query_BQ]]

        self._num_padded = len(self._padded_index_N)
        # keys up to the last one that a token sees: `width` is the widest row's, and may reach beyond the pages of a row near its end
        seen_BW = (new.visible_BQW & is_query_BQ.unsqueeze(-1)).any(1)
        reach_B = (seen_BW * torch.arange(1, width + 1, device=device)).amax(-1) if width else 0
        self._num_keys = int((new.prefix_B + reach_B).max())
        key_T = torch.arange(self._num_keys, device=device)
        in_region_BT = key_T - new.prefix_B.unsqueeze(-1)
        index_BQT = in_region_BT.clamp(0, max(width - 1, 0)).unsqueeze(1).expand(-1, num_queries, -1)
        visible_BQT = new.visible_BQW.gather(2, index_BQT) & (in_region_BT < width).unsqueeze(1)
        # a padded query sees key 0, so that none is masked everywhere
        visible_BQT = visible_BQT | (in_region_BT < 0).unsqueeze(1) | (key_T == 0)
        self._visible_BQT = visible_BQT if num_queries else None
        self._mask: Tensor | None = None

        self._prompts = []
        start = self._num_padded
        for row, length in new.prompts:
            prefix = int(new.prefix_B[row])
            numbers.append(torch.full((length,), row, device=device))
            places.append(torch.arange(prefix, prefix + length, device=device))
            self._prompts.append((slice(start, start + length), row, prefix))
            start += length
        self._table_BP = new.table_BP
        self._address_N = find_addresses(new.table_BP, torch.cat(numbers), torch.cat(places))

    def __call__(self, layer: int, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scale: float) -> Tensor:
        """Store the new keys and values, and attend: [N, H, D]."""
        self._cache.write(layer, self._address_N, key_NKD, value_NKD)
        out_NHD = torch.empty_like(query_NHD)
        if self._num_padded:
            out_NHD[: self._num_padded] = self._attend_padded(layer, query_NHD, scale)
        for tokens, row, prefix in self._prompts:
            out_NHD[tokens] = self._attend_prompt(layer, query_NHD[tokens], row, prefix, scale)
        return out_NHD

    def _attend_padded(self, layer: int, query_NHD: Tensor, scale: float) -> Tensor:
        key, value = self._cache.gather(layer, self._table_BP, self._num_keys)
        num_rows, num_kv_heads = key.shape[:2]
        num_queries, (num_heads, head_dim) = self._packed_BQ.shape[1], query_NHD.shape[1:]
        group = num_heads // num_kv_heads
        query = query_NHD[self._packed_BQ].view(num_rows, num_queries, num_kv_heads, group, head_dim)
        query = query.permute(0, 2, 3, 1, 4).reshape(num_rows, num_kv_heads, group * num_queries, head_dim)
        if self._mask is None:
            mask = torch.zeros_like(self._visible_BQT, dtype=query.dtype).masked_fill_(~self._visible_BQT, -torch.inf)
            self._mask = mask.repeat(1, group, 1).unsqueeze(1)
        out = scaled_dot_product_attention(query, key, value, attn_mask=self._mask, scale=scale)
        out = out.view(num_rows, num_kv_heads, group, num_queries, head_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(num_rows * num_queries, num_heads, head_dim)[self._padded_index_N]

    def _attend_prompt(self, layer: int, query_NHD: Tensor, row: int, prefix: int, scale: float) -> Tensor:
        length = query_NHD.shape[0]
        key, value = self._cache.gather(layer, self._table_BP[row : row + 1], prefix + length)
        query = query_NHD.transpose(0, 1).unsqueeze(0)
        mask = None
        if prefix:
            mask = torch.ones(length, prefix + length, dtype=torch.bool, device=query.device).tril(prefix)
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)


BACKENDS = {"sdpa": SdpaPass, "native": NativePass}


def find_backend(name: str, cache: KVCache) -> str:
    """The name of the backend for a cache. auto: the compiled kernels where they can be used, else sdpa.

    Raises UserError for `native` where they cannot.
    """
    if name not in ("auto", "native"):
        return name
    reason = why_not_native(cache)
    if reason is None:
        return "native"
    if name == "native":
        raise UserError(f"model.attention='native': {reason}; allowed: auto, sdpa")
    return "sdpa"
