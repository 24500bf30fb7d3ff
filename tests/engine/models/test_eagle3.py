"""The EAGLE-3 head against a plain dense reading of LAW.md 1.2: loops over positions and heads, float64."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import logging

from engine.models.checkpoint import load_eagle3
from engine.models.loading import load_causal_lm
from tests.tiny_models import tiny_eagle3, tiny_llama

HEADS, KV_HEADS, HEAD_DIM, EPS = 4, 2, 8, 1e-5
TOKENS = torch.randint(0, 32, (9,), generator=torch.Generator().manual_seed(3))
FEATURES = torch.randn(9, 96, generator=torch.Generator().manual_seed(4)) * 5
POSITIONS = torch.tensor([0, 1, 2, 3, 4, 5, 6, 6, 40])  # tree nodes repeat positions


def causal_attend(query_NAD: Tensor, key_NGD: Tensor, value_NGD: Tensor) -> Tensor:
    """One sequence, each token sees those before it and itself."""
    out = torch.nn.functional.scaled_dot_product_attention(
        query_NAD.transpose(0, 1), key_NGD.transpose(0, 1), value_NGD.transpose(0, 1), is_causal=True, enable_gqa=True
    )
    return out.transpose(0, 1)


def plain_frequencies(theta: float) -> list[float]:
    return [theta ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)]


def dense_rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean() + EPS).sqrt() * weight.double()


def dense_forward(
    w: dict[str, Tensor],
    embedding: Tensor,
    tokens: list[int],
    features: Tensor,
    positions: list[int],
    frequencies: list[float],
    *,
    rotary_scale: float = 1.0,
    norm_before_residual: bool = False,
):
    """(g before the last norm, logits) of LAW.md 1.2, position by position; w as in the file, everything float64."""
    w = {name: t.double() for name, t in w.items()}

    def rms(x: Tensor, name: str) -> Tensor:
        return dense_rms(x, w[name])

    def turn(x: Tensor, position: int) -> Tensor:
        half = len(x) // 2
        out = torch.empty_like(x)
        for i, frequency in enumerate(frequencies):
            cos, sin = (rotary_scale * function(position * frequency) for function in (math.cos, math.sin))
            out[i] = x[i] * cos - x[i + half] * sin
            out[i + half] = x[i + half] * cos + x[i] * sin
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
        residual = rms(f, "midlayer.hidden_norm.weight") if norm_before_residual else f
        a = residual + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(heads)
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


def add_tensors(folder, **tensors):
    """Adds tensors to the file; dots are written as __."""
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({**load_file(folder / "model.safetensors"), **named}, folder / "model.safetensors")


def assert_equals_dense(folder, target, frequencies, **variant):
    head = load(folder, target)
    feature = head.fuse(FEATURES)
    g = head(TOKENS, feature, POSITIONS, causal_attend)
    weights, embedding = load_file(folder / "model.safetensors"), target.model.embed_tokens.weight
    dense_g, dense_logits = dense_forward(weights, embedding, TOKENS.tolist(), feature, POSITIONS.tolist(), frequencies, **variant)
    torch.testing.assert_close(g.double(), dense_g, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(head.logits(g).double(), dense_logits, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("theta", [None, 500.0])
def test_logits_equal_the_dense_reading(tmp_path, target, theta):
    folder = tiny_eagle3(tmp_path / "draft", target.config, draft_vocab=20, seed=2, rope_theta=theta)
    assert_equals_dense(folder, target, plain_frequencies(theta or 10000.0))
    weight = load_file(folder / "model.safetensors")["fc.weight"]
    torch.testing.assert_close(load(folder, target).fuse(FEATURES), FEATURES @ weight.T)


def test_norm_before_residual(tmp_path, target):
    folder = tiny_eagle3(tmp_path / "draft", target.config, draft_vocab=20, seed=2, norm_before_residual=True)
    assert_equals_dense(folder, target, plain_frequencies(10000.0), norm_before_residual=True)
    with pytest.raises(AssertionError):
        assert_equals_dense(folder, target, plain_frequencies(10000.0))


def test_norm_output_hands_the_normed_feature_on(tmp_path, target):
    """Of the first draft step only the feature differs; from the second on the logits do."""
    head = load(tiny_eagle3(tmp_path / "plain", target.config, seed=2), target)
    folder = tiny_eagle3(tmp_path / "normed", target.config, seed=2, norm_output=True)
    normed_head = load(folder, target)
    feature = head.fuse(FEATURES)
    g, normed_g = (h(TOKENS, feature, POSITIONS, causal_attend) for h in (head, normed_head))
    weights = load_file(folder / "model.safetensors")
    expected = torch.stack([dense_rms(row.double(), weights["norm.weight"]) for row in g])
    torch.testing.assert_close(normed_g.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(normed_head.logits(normed_g), head.logits(g), atol=0, rtol=0)
    next_logits = normed_head.logits(normed_head(TOKENS, normed_g, POSITIONS + 1, causal_attend))
    embedding, places = target.model.embed_tokens.weight, (POSITIONS + 1).tolist()
    _, dense_logits = dense_forward(weights, embedding, TOKENS.tolist(), expected, places, plain_frequencies(10000.0))
    torch.testing.assert_close(next_logits.double(), dense_logits, atol=2e-4, rtol=2e-4)
    assert (next_logits - head.logits(head(TOKENS, g, POSITIONS + 1, causal_attend))).abs().max() > 0.01


def test_norms_before_fc(tmp_path, target):
    """norm_before_fc: one norm over all three features; fc_norm: one for each. Their sizes differ, so the results do."""
    generator = torch.Generator().manual_seed(5)
    scales = torch.tensor([1.0, 10.0, 100.0]).repeat_interleave(32)
    norm = 1 + torch.randn(96, generator=generator) * 0.3
    together = tiny_eagle3(tmp_path / "together", target.config, seed=2, norm_before_fc=True)
    add_tensors(together, input_norm__weight=norm)
    apart = tiny_eagle3(tmp_path / "apart", target.config, seed=2, fc_norm=True)
    add_tensors(apart, **{f"fc_norm__{i}__weight": part.clone() for i, part in enumerate(norm.chunk(3))})
    fc = load_file(apart / "model.safetensors")["fc.weight"].double()
    features = FEATURES * scales
    expected = {
        together: torch.stack([fc @ dense_rms(row, norm) for row in features.double()]),
        apart: torch.stack(
            [fc @ torch.cat([dense_rms(f, n) for f, n in zip(row.chunk(3), norm.chunk(3), strict=True)]) for row in features.double()]
        ),
    }
    for folder, feature in expected.items():
        torch.testing.assert_close(load(folder, target).fuse(features).double(), feature, atol=1e-4, rtol=1e-4)
    assert (expected[together] - expected[apart]).abs().max() > 0.1


def llama3_frequencies(theta: float, factor: float, low: float, high: float, trained: int) -> list[float]:
    """Long waves are stretched by `factor`, short ones stay, those between are mixed."""
    frequencies = []
    for frequency in plain_frequencies(theta):
        turns = trained * frequency / (2 * math.pi)
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        frequencies.append(share * frequency + (1 - share) * frequency / factor)
    return frequencies


def yarn_frequencies(theta: float, factor: float, trained: int) -> list[float]:
    """As above, mixed by the channel's place between those that turn 32 times and once within the trained length."""
    first, last = (HEAD_DIM * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (32, 1))
    first, last = max(math.floor(first), 0), min(math.ceil(last), HEAD_DIM - 1)
    shares = [1 - min(1.0, max(0.0, (i - first) / (last - first))) for i in range(HEAD_DIM // 2)]
    return [s * f + (1 - s) * f / factor for s, f in zip(shares, plain_frequencies(theta), strict=True)]


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS = [
    ("linear", {"factor": 4.0}, [frequency / 4 for frequency in plain_frequencies(50.0)], 1.0),
    ("llama3", LLAMA3, llama3_frequencies(50.0, 8.0, 1.0, 4.0, 64), 1.0),
    ("yarn", YARN, yarn_frequencies(50.0, 4.0, 64), 0.1 * math.log(4.0) + 1),
]


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize(("kind", "numbers", "frequencies", "rotary_scale"), SCALINGS, ids=[scaling[0] for scaling in SCALINGS])
def test_rotary_scaling(tmp_path, target, version, kind, numbers, frequencies, rotary_scale):
    """In the fields of transformers 4 and of 5; base 50, so that every kind of channel is among the four."""
    if version == 4:
        fields = {"rope_theta": 50.0, "rope_scaling": {"rope_type": kind, "type": kind, **numbers}}
    else:
        fields = {"rope_theta": None, "rope_parameters": {"rope_type": kind, "rope_theta": 50.0, **numbers}}
    folder = tiny_eagle3(tmp_path / "draft", target.config, draft_vocab=20, seed=2, **fields)
    assert_equals_dense(folder, target, frequencies, rotary_scale=rotary_scale)
    with pytest.raises(AssertionError):
        assert_equals_dense(folder, target, plain_frequencies(50.0))


def test_transformers_gives_no_advice_on_a_scaling(tmp_path, target, caplog):
    """It would compare the head's scaling with a trained length that nobody has set."""
    folder = tiny_eagle3(tmp_path / "draft", target.config, rope_scaling={"rope_type": "llama3", **LLAMA3, "factor": 0.5})
    logging.add_handler(caplog.handler)
    load(folder, target)
    logging.remove_handler(caplog.handler)
    assert not caplog.records


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
