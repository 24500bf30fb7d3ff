"""Fused layers against transformers' own: the same hidden states, features and logits within the rounding of bf16."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine import target as target_module
from engine.attention import BACKENDS, find_backend
from engine.fused_layers import can_fuse
from engine.models.loading import load_causal_lm
from engine.packing import pack, pad_runs
from engine.target import Target
from tests.kernels import needs_kernels
from tests.tiny_models import tiny_target

LAYERS = (1, 0, 2)
RUNS = [[5, 6, 7], [9] * 70, [3, 4], [11]]


def load(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """With norms whose weights are not all one."""
    model, generator = load_causal_lm(folder, dtype, "cpu"), torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.copy_(torch.rand(parameter.shape, generator=generator).bfloat16() + 0.5)
    return model


def run(model: PreTrainedModel, monkeypatch, *, fused: bool) -> list[Tensor]:
    """Prompts, one of them long, then another token of each row."""
    with monkeypatch.context() as patch:
        if not fused:
            patch.setattr(target_module, "can_fuse", lambda model: False)
        target = Target(model, LAYERS)
    cache = target.new_cache()
    table_BP = torch.arange(2 * len(RUNS)).flip(0).view(-1, 2)
    cache.reserve(table_BP.numel())
    cache.clear(range(table_BP.numel()))
    backend = BACKENDS[find_backend("auto" if fused else "sdpa", cache)]
    prefix_B, outs = torch.zeros(len(RUNS), dtype=torch.long), []
    with torch.inference_mode():
        for runs in (RUNS, [[8]] * len(RUNS)):
            packed = pack(*pad_runs(runs, target.device), prefix_B, table_BP)
            hidden_NH, feature_NF = target.forward(packed.token_N, packed.position_N, backend(cache, packed.new))
            outs += [hidden_NH.float(), feature_NF.float(), target.logits(hidden_NH)]
            prefix_B = prefix_B + torch.tensor([len(tokens) for tokens in runs])
    return outs


@needs_kernels
@pytest.mark.parametrize("architecture", ("llama", "mistral", "qwen2", "qwen3"))
def test_nothing_but_roundings_differs(architecture, tmp_path, monkeypatch):
    folder = tiny_target(tmp_path, architecture, hidden=128, layers=3, heads=2, kv_heads=1, scale=0.1, **_SIZES.get(architecture, {}))
    exact = run(load(folder, torch.float32), monkeypatch, fused=False)
    plain = run(load(folder, torch.bfloat16), monkeypatch, fused=False)
    model = load(folder, torch.bfloat16)
    assert can_fuse(model)
    fused = run(model, monkeypatch, fused=True)
    for true, by_layers, found in zip(exact, plain, fused, strict=True):
        rounding = (by_layers - true).abs().mean()
        assert (found - true).abs().mean() < 1.3 * rounding + 1e-6
        assert (found - true).abs().mean() < 0.03 * true.abs().mean()


_SIZES = {"mistral": {"head_dim": 64}, "qwen3": {"head_dim": 64}}


def test_other_models_keep_their_own_layers(tmp_path: Path):
    small = tiny_target(tmp_path / "small", hidden=24, layers=1)
    assert not can_fuse(load_causal_lm(small, torch.bfloat16, "cpu"))
    fitting = tiny_target(tmp_path / "fitting", hidden=128, layers=1, heads=2, kv_heads=1)
    assert not can_fuse(load_causal_lm(fitting, torch.float32, "cpu"))
