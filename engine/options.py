"""What `Engine.load` is asked for, checked, and each "auto" resolved for this machine. All refusals are UserErrors."""

from __future__ import annotations

import logging
import math

import torch

from engine.attention import BACKENDS
from engine.errors import UserError, unknown_name
from engine.memory import available_bytes
from engine.models.folder import LengthLimit, check_max_model_len
from engine.native.build import why_none

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_AUTO_MAX_BATCH = {"cpu": 16, "cuda": 64}


def check_limits(*, max_batch: object, max_model_len: object, kv_cache_gib: object, seed: object) -> None:
    """Raises UserError with the option, its value and what is allowed."""

    def is_int(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

    is_number = is_int(kv_cache_gib) or (isinstance(kv_cache_gib, float) and math.isfinite(kv_cache_gib))
    for name, value, is_valid, allowed in (
        ("engine.max_batch", max_batch, max_batch == "auto" or (is_int(max_batch) and max_batch >= 1), "auto, or an integer >= 1"),
        ("model.max_model_len", max_model_len, max_model_len is None or (is_int(max_model_len) and max_model_len >= 2), "an integer >= 2"),
        ("engine.kv_cache_gib", kv_cache_gib, kv_cache_gib == "auto" or (is_number and kv_cache_gib > 0), "auto, or a finite number > 0"),
        ("job.seed", seed, is_int(seed) and abs(seed) < 2**63, "a 64-bit integer"),
    ):
        if not is_valid:
            raise UserError(f"{name}={value!r}; allowed: {allowed}")


def resolve_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = device.partition(":") if isinstance(device, str) else (None, "", "")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise UserError(unknown_name("model.device", device, ["auto", "cpu", "cuda", "cuda:N"]))
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"model.device='{device}', but torch {torch.__version__} sees no GPU here; allowed: auto, cpu")
    if index and kind == "cuda" and int(index) >= torch.cuda.device_count():
        raise UserError(f"model.device='{device}'; allowed: cuda:0 to cuda:{torch.cuda.device_count() - 1}")
    return torch.device(device)


def resolve_dtype(dtype: str, device: torch.device, *, reproducible: bool) -> torch.dtype:
    if dtype == "auto":
        if reproducible:
            return torch.float32
        has_bfloat16 = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return torch.bfloat16 if device.type == "cuda" or has_bfloat16 else torch.float32
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise UserError(unknown_name("model.dtype", dtype, ["auto", *_DTYPES]))
    if reproducible:
        check_reproducible(_DTYPES[dtype])
    return _DTYPES[dtype]


def check_reproducible(dtype: torch.dtype) -> None:
    if dtype != torch.float32:
        raise UserError(f"engine.reproducible=true with model.dtype={str(dtype).removeprefix('torch.')}; allowed: float32")


def check_attention(attention: object) -> None:
    if not isinstance(attention, str) or attention not in ("auto", *BACKENDS):
        raise UserError(f"{unknown_name('model.attention', attention, ['auto', *BACKENDS])}; flash and flex are not built yet")


def tell_of_kernels(dtype: torch.dtype, device: torch.device) -> None:
    """Warns where the compiled kernels could be used and are not there."""
    if device.type == "cpu" and dtype == torch.bfloat16 and (reason := why_none()) is not None:
        logger.warning("no compiled kernels, so torch does their work, which takes up to twice as long: %s", reason)


def resolve_max_model_len(max_model_len: int | None, limit: LengthLimit) -> int:
    """Tokens of prompt and output together; None becomes the model's limit, which is announced where it is a window."""
    if max_model_len is None:
        if limit.field == "sliding_window":
            logger.warning("model.max_model_len is %d: attention beyond the model's sliding_window is not built", limit.num_tokens)
        return limit.num_tokens
    check_max_model_len(max_model_len, limit)
    return max_model_len


def resolve_kv_cache_gib(kv_cache_gib: float | str, device: torch.device) -> float:
    """Half of the memory that is free once the models are loaded: what a pass computes takes memory too."""
    if kv_cache_gib != "auto":
        return kv_cache_gib
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = available_bytes()
    return free / 2 / 2**30


def resolve_max_batch(max_batch: int | str, device: torch.device) -> int:
    return _AUTO_MAX_BATCH[device.type] if max_batch == "auto" else max_batch
