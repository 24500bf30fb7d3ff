"""The attention backend of the kernels (attention.cpp): bf16 on the CPU, heads of 64 or 128 channels."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kv_cache import KVCache
from engine.native.build import load_kernels, why_none
from engine.new_tokens import NewTokens
from engine.pages import PAGE

HEAD_SIZES = (64, 128)


def why_not_native(cache: KVCache) -> str | None:
    """Why the kernels cannot attend over a cache, or None where they can."""
    if cache.key.device.type != "cpu" or cache.key.dtype != torch.bfloat16:
        return f"it is for bfloat16 on the CPU, and the model is in {str(cache.key.dtype).removeprefix('torch.')} on {cache.key.device}"
    if cache.key.shape[-1] not in HEAD_SIZES:
        return f"it is for heads of {' or '.join(map(str, HEAD_SIZES))} channels, and the model's have {cache.key.shape[-1]}"
    return why_none()


class NativePass:
    """As `engine.attention.SdpaPass`; queries, keys and values may be parts of one tensor, the heads of a token side by side."""

    def __init__(self, cache: KVCache, new: NewTokens):
        self._cache = cache
        num_rows, num_queries, width = new.visible_BQW.shape
        row_B = torch.arange(num_rows)
        offset_B = row_B * (num_queries * width)
        columns = [row_B, new.prefix_B, new.start_B, new.count_B, torch.full_like(row_B, width), offset_B, new.prefix_B + new.offset]
        rows = torch.stack(columns, 1)
        if new.prompts:
            start = int(new.count_B.sum())
            prompts = []
            for row, length in new.prompts:
                prefix = int(new.prefix_B[row])
                prompts.append([row, prefix, start, length, 0, -1, prefix])
                start += length
            rows = torch.cat([rows, torch.tensor(prompts)])
        assert not len(rows) or int((rows[:, 6] + rows[:, 3]).max()) <= new.table_BP.shape[1] * PAGE, "the rows have too few pages"
        self._rows, self._visible, self._table = rows.contiguous(), new.visible_BQW.contiguous(), new.table_BP.contiguous()

    def __call__(self, layer: int, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scale: float) -> Tensor:
        """Store the new keys and values, and attend: [N, H, D]."""
        assert all(x.stride()[1:] == (x.shape[2], 1) for x in (query_NHD, key_NKD, value_NKD)), "the heads of a token lie side by side"
        kernels, rows, table = load_kernels(), self._rows, self._table
        key, value = self._cache.key[layer], self._cache.value[layer]
        strides, (kv_heads, head_dim) = key.stride()[:2], key_NKD.shape[1:]
        kernels.rheo_store(
            key_NKD.data_ptr(), key_NKD.stride(0), value_NKD.data_ptr(), value_NKD.stride(0), key.data_ptr(), value.data_ptr(), *strides,
            table.data_ptr(), table.shape[1], rows.data_ptr(), len(rows), kv_heads, head_dim,
        )  # fmt: skip
        out_NHD = torch.empty(query_NHD.shape, dtype=query_NHD.dtype)
        kernels.rheo_attend(
            query_NHD.data_ptr(), query_NHD.stride(0), out_NHD.data_ptr(), key.data_ptr(), value.data_ptr(), *strides,
            table.data_ptr(), table.shape[1], rows.data_ptr(), len(rows), self._visible.data_ptr(),
            query_NHD.shape[1], kv_heads, head_dim, scale, torch.get_num_threads(),
        )  # fmt: skip
        return out_NHD
