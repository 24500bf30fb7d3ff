"""The EAGLE-3 head against a plain dense reading of LAW.md 1.2: loops over positions and heads, float64."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.models.checkpoint import load_eagle3
from engine.models.loading import load_causal_lm
from tests.tiny_models import tiny_eagle3, tiny_llama

HEADS, KV_HEADS, EPS = 4, 2, 1e-5


def causal_attend(query_NAD: Tensor, key_NGD: Tensor, value_NGD: Tensor) -> Tensor:
    """One sequence, each token sees those before it and itself."""
    out = torch.nn.functional.scaled_dot_product_attention(
        query_NAD.transpose(0, 1), key_NGD.transpose(0, 1), value_NGD.transpose(0, 1), is_causal=True, enable_gqa=True
    )
    return out.transpose(0, 1)


def dense_forward(w: dict[str, Tensor], embedding: Tensor, tokens: list[int], features: Tensor, positions: list[int], theta: float):
    """(g, logits) of LAW.md 1.2, position by position; w as in the file, everything float64."""
    w = {name: t.double() for name, t in w.items()}

    def rms(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean() + EPS).sqrt() * w[name]

    def turn(x: Tensor, position: int) -> Tensor:
        half = len(x) // 2
        out = torch.empty_like(x)
        for i in range(half):
            angle = position / theta ** (2 * i / len(x))
            out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
            out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
        return out

    queries, keys, values = [], [], []
    for token, f, position in zip(tokens, features.double(), positions, strict=True):
        e = embedding[token].double()
        x = torch.cat((rms(e, "midlayer.input_layernorm.weight"), rms(f, "midlayer.hidden_norm.weight")))
        q, k, v = (w[f"midlayer.self_attn.{kind}_proj.weight"] @ x for kind in "qkv")
        queries.append([turn(head, position) for head in q.chunk(HEADS)])
        keys.append([turn(head, position) for head in k.chunk(KV_HEADS)])
        values.append(v.chunk(KV_HEADS))
    g_all, logits_all = [], []
    for n, f in enumerate(features.double()):
        heads = []
        for a in range(HEADS):
            group = a // (HEADS // KV_HEADS)
            scores = torch.stack([queries[n][a] @ keys[j][group] / math.sqrt(len(queries[n][a])) for j in range(n + 1)])
            weights = scores.softmax(0)
            heads.append(sum(weights[j] * values[j][group] for j in range(n + 1)))
        a = f + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(heads)
        x = rms(a, "midlayer.post_attention_layernorm.weight")
        gate, up = w["midlayer.mlp.gate_proj.weight"] @ x, w["midlayer.mlp.up_proj.weight"] @ x
        g = a + w["midlayer.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
        g_all.append(g)
        logits_all.append(w["lm_head.weight"] @ rms(g, "norm.weight"))
    return torch.stack(g_all), torch.stack(logits_all)


@pytest.fixture
def target(tmp_path):
    return load_causal_lm(tiny_llama(tmp_path / "target", layers=6, seed=1), torch.float32, "cpu")


def load(folder, target):
    embedding = target.model.embed_tokens.weight
    return load_eagle3(folder, target_config=target.config, embedding=embedding, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("theta", [None, 500.0])
def test_logits_equal_the_dense_reading(tmp_path, target, theta):
    folder = tiny_eagle3(tmp_path / "draft", target.config, draft_vocab=20, seed=2, rope_theta=theta)
    head = load(folder, target)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 32, (9,), generator=generator)
    features = torch.randn(9, 96, generator=generator) * 5
    positions = torch.tensor([0, 1, 2, 3, 4, 5, 6, 6, 40])  # tree nodes repeat positions
    feature = head.fuse(features)
    g = head(tokens, feature, positions, causal_attend)
    weights = load_file(folder / "model.safetensors")
    torch.testing.assert_close(feature, features @ weights["fc.weight"].T)
    g_dense, logits_dense = dense_forward(
        weights, target.model.embed_tokens.weight, tokens.tolist(), feature, positions.tolist(), theta or 10000.0
    )
    torch.testing.assert_close(g.double(), g_dense, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(head.logits(g).double(), logits_dense, atol=2e-4, rtol=2e-4)


def test_rotary_base_matters_and_defaults_to_10000(tmp_path, target):
    logits = {}
    for name, base in {"absent": None, "1e4": 10000.0, "1e5": 100000.0}.items():
        head = load(tiny_eagle3(tmp_path / name, target.config, seed=2, rope_theta=base), target)
        feature = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
        logits[name] = head.logits(head(torch.arange(6), feature, torch.arange(6) * 7, causal_attend))
    torch.testing.assert_close(logits["absent"], logits["1e4"], atol=0, rtol=0)
    assert (logits["absent"] - logits["1e5"]).abs().max() > 0.01


def test_rotary_base_is_read_from_rope_parameters_too(tmp_path, target):
    rope = {"rope_type": "default", "rope_theta": 777.0}
    head = load(tiny_eagle3(tmp_path / "draft", target.config, rope_theta=None, rope_parameters=rope), target)
    assert head.config.rope_theta == 777.0


def test_a_step_at_a_time_equals_all_at_once(tmp_path, target):
    """The head keeps nothing between calls: with a cache in `attend`, one token per call gives the same g."""
    head = load(tiny_eagle3(tmp_path / "draft", target.config, seed=2), target)
    tokens, feature = torch.tensor([3, 9, 4, 7]), torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    together = head(tokens, feature, torch.arange(4), causal_attend)
    keys, values, alone = [], [], []

    def attend_cached(query, key, value):
        keys.append(key)
        values.append(value)
        all_keys, all_values = torch.cat(keys).transpose(0, 1), torch.cat(values).transpose(0, 1)
        out = torch.nn.functional.scaled_dot_product_attention(query.transpose(0, 1), all_keys, all_values, enable_gqa=True)
        return out.transpose(0, 1)

    for n in range(4):
        alone.append(head(tokens[n : n + 1], feature[n : n + 1], torch.tensor([n]), attend_cached))
    torch.testing.assert_close(torch.cat(alone), together, atol=1e-5, rtol=1e-5)


def test_attend_gets_heads_apart_and_unscaled(tmp_path, target):
    head = load(tiny_eagle3(tmp_path / "draft", target.config, seed=2), target)
    seen = {}

    def attend(query, key, value):
        seen.update(query=query, key=key, value=value)
        return torch.zeros_like(query)

    feature = torch.randn(5, 32)
    head(torch.arange(5), feature, torch.zeros(5, dtype=torch.int64), attend)
    assert seen["query"].shape == (5, 4, 8)
    assert seen["key"].shape == seen["value"].shape == (5, 2, 8)


def test_rotary_angles_stay_exact_in_bfloat16(tmp_path, target):
    """Positions near 8,000 turned with a rounded table would be wrong by radians."""
    folder = tiny_eagle3(tmp_path / "draft", target.config, seed=2)
    head = load_eagle3(folder, target_config=target.config, embedding=target.model.embed_tokens.weight, dtype=torch.bfloat16, device="cpu")
    cos, _ = head.to(torch.bfloat16)._rotary(torch.tensor([7919]), torch.float32)
    assert abs(cos[0, 0, 1].item() - math.cos(7919 * 10000 ** (-2 / 8))) < 1e-3
    assert head.d2t.dtype == torch.int64
