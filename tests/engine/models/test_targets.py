"""Every architecture, and every preset's layout, against transformers' own greedy text."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from jinja2.exceptions import TemplateError
from transformers import AutoConfig, AutoModelForCausalLM

from engine import Engine, SamplingParams, Speculation, UserError
from engine.models.eagle3_config import check_fits_target, default_feature_layers, read_eagle3_config
from engine.models.folder import TARGET_SIZES, LengthLimit, check_target_config, find_length_limit, read_config
from engine.models.loading import load_causal_lm, load_tokenizer
from engine.models.presets import PRESETS
from engine.options import resolve_max_model_len
from engine.target import Target
from tests.engine.models.tiny_hub import TinyHub
from tests.engine.tiny_engines import LAYERS, VOCAB, random_prompts, run
from tests.tiny_models import LLAMA3_ROPE, pickle_weights, rotary_frequencies, save_sentencepiece, tiny_eagle3, tiny_target

LENGTH = 12
PROMPTS = random_prompts([5, 40, 1, 17])


@torch.inference_mode()
def reference_texts(folder: Path, prompts: list[list[int]] = PROMPTS, num_tokens: int = LENGTH) -> list[list[int]]:
    """transformers' own greedy texts, one prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens, pad_token_id=0)
        texts.append(out[0, len(prompt) :].tolist())
    return texts


def greedy_texts(engine: Engine, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [result.token_ids for result in run(engine, prompts, SamplingParams(temperature=0.0, max_tokens=LENGTH))]


TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with the scaling of 3.1": ("llama", {"rope_parameters": {**LLAMA3_ROPE, "original_max_position_embeddings": 64}}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "vicuna": ("llama", {"kv_heads": 4, "tie_word_embeddings": False, "rms_norm_eps": 1e-6}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen2 with yarn": ("qwen2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}, "kv_heads": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3 untied": ("qwen3", {"tie_word_embeddings": False, "attention_bias": True}),
}


@pytest.mark.parametrize("name", TARGETS)
def test_greedy_equals_transformers(name, tmp_path):
    architecture, config = TARGETS[name]
    target = tiny_target(tmp_path / "target", architecture, vocab=VOCAB, layers=LAYERS, **config)
    draft = tiny_eagle3(tmp_path / "draft", AutoConfig.from_pretrained(target))
    expected = reference_texts(target)
    for method in ("off", "rheo", "topk"):
        speculation = Speculation(method=method, tree_size=10, depth=3, top_k=4)
        engine = Engine.load(target, draft, dtype="float32", speculation=speculation, max_batch=3)
        assert greedy_texts(engine) == expected, method


@pytest.mark.parametrize("architecture", ["mistral", "qwen2", "qwen3"])
def test_a_language_model_drafts_for_each_architecture(architecture, tmp_path):
    target = tiny_target(tmp_path / "target", architecture, vocab=VOCAB)
    draft = tiny_target(tmp_path / "draft", architecture, vocab=VOCAB, layers=2, vocab_size=VOCAB + 8)
    engine = Engine.load(target, draft, dtype="float32", speculation=Speculation(method="topk", tree_size=6, depth=2, top_k=3))
    assert greedy_texts(engine) == reference_texts(target)


WINDOW = 24
WINDOWS: list[tuple[str, dict[str, Any], LengthLimit]] = [
    ("mistral", {"sliding_window": WINDOW}, LengthLimit(WINDOW, "sliding_window")),
    ("mistral", {"sliding_window": 4096}, LengthLimit(512, "max_position_embeddings")),
    ("mistral", {"sliding_window": None}, LengthLimit(512, "max_position_embeddings")),
    ("qwen2", {"sliding_window": WINDOW}, LengthLimit(512, "max_position_embeddings")),
    ("qwen2", {"sliding_window": WINDOW, "use_sliding_window": True}, LengthLimit(512, "max_position_embeddings")),
    ("qwen2", {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 3}, LengthLimit(WINDOW, "sliding_window")),
    ("qwen3", {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 4}, LengthLimit(512, "max_position_embeddings")),
    (
        "qwen3",
        {"sliding_window": WINDOW, "use_sliding_window": True, "layer_types": ["full_attention"] * 3 + ["sliding_attention"]},
        LengthLimit(WINDOW, "sliding_window"),
    ),
]


@pytest.mark.parametrize("architecture, config, limit", WINDOWS)
def test_a_window_limits_the_length(architecture, config, limit, tmp_path):
    """By the file and by the loaded model alike. At the limit the text is still transformers', which knows windows; past it no longer."""
    folder = tiny_target(tmp_path / "target", architecture, vocab=VOCAB, **config)
    assert find_length_limit(read_config(folder)) == limit
    assert Target(load_causal_lm(folder, torch.float32, "cpu")).length_limit == limit
    if limit.num_tokens == WINDOW:
        prompts = random_prompts([WINDOW - LENGTH, WINDOW - 1])
        engine = Engine.load(folder, dtype="float32", speculation=Speculation(method="off"))
        assert engine.max_model_len == WINDOW
        assert greedy_texts(engine, prompts) == [
            reference_texts(folder, prompts[:1])[0],
            reference_texts(folder, prompts[1:], num_tokens=1)[0],
        ]
        with_window = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        without = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, sliding_window=512)
        (prompt,) = random_prompts([WINDOW + 1])
        with torch.inference_mode():
            same = (with_window(torch.tensor([prompt])).logits - without(torch.tensor([prompt])).logits)[0].abs().amax(-1) < 1e-4
        assert same.tolist() == [True] * WINDOW + [False]


def test_mistrals_window_when_the_file_does_not_name_it():
    assert find_length_limit({"model_type": "mistral", "max_position_embeddings": 32768}) == LengthLimit(4096, "sliding_window")


def test_a_length_beyond_the_window(caplog):
    limit = LengthLimit(4096, "sliding_window")
    assert resolve_max_model_len(1000, limit) == 1000
    assert resolve_max_model_len(None, LengthLimit(512, "max_position_embeddings")) == 512
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert resolve_max_model_len(None, limit) == 4096
    assert "model.max_model_len is 4096: attention beyond the model's sliding_window" in caplog.text
    with pytest.raises(UserError, match=r"model.max_model_len=4097; allowed: up to 4096, the model's sliding_window"):
        resolve_max_model_len(4097, limit)


_LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {name: value for name, value in LLAMA3_ROPE.items() if name != "rope_theta"},
    "tie_word_embeddings": False,
}
_DRAFT_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "pad_token_id": 0,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
}
_VICUNA_13B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_DRAFT_13B = {
    **{name: value for name, value in _DRAFT_8B.items() if name != "num_key_value_heads"},
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_attention_heads": 40,
    "vocab_size": 32000,
}

#: preset -> config.json of its target and of its draft (LAW.md 1.5), and the layers whose inputs the draft reads
CONFIGURATIONS = {
    "llama-3.1-8b-instruct": (_LLAMA_8B, _DRAFT_8B, (2, 16, 29)),
    "vicuna-13b-v1.3": (_VICUNA_13B, _DRAFT_13B, (2, 20, 37)),
    "deepseek-r1-distill-llama-8b": (_LLAMA_8B, _DRAFT_8B, (2, 16, 29)),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_configuration_of_a_preset(name, tmp_path):
    target, draft, feature_layers = CONFIGURATIONS[name]
    check_target_config(target, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(draft))
    config = read_eagle3_config(tmp_path)
    check_fits_target(config, tmp_path, **{field: target[field] for field in TARGET_SIZES})
    assert (config.rope_theta, config.num_key_value_heads) == (10000.0, draft.get("num_key_value_heads", draft["num_attention_heads"]))
    assert config.feature_layers is None and default_feature_layers(target["num_hidden_layers"]) == feature_layers
    assert (PRESETS[name].tree_size, PRESETS[name].depth) == (60, 8)


def build_repositories(root: Path, name: str) -> None:
    """The preset's two repositories with their layers and formats, and 1/128 of their widths."""
    target_config, _, _ = CONFIGURATIONS[name]
    preset = PRESETS[name]
    target, draft = root / preset.hub_id, root / preset.draft
    same = ("rms_norm_eps", "max_position_embeddings", "tie_word_embeddings")
    kv_heads = 4 * target_config.get("num_key_value_heads", target_config["num_attention_heads"]) // target_config["num_attention_heads"]
    sizes = {"hidden": target_config["hidden_size"] // 128, "layers": target_config["num_hidden_layers"], "kv_heads": kv_heads}
    if "rope_scaling" in target_config:
        sizes["rope_parameters"] = LLAMA3_ROPE
    config = AutoConfig.from_pretrained(
        tiny_target(target, vocab=400, scale=0.15, **sizes, **{field: target_config[field] for field in same})
    )
    if name.startswith("vicuna"):
        save_sentencepiece(target, 400)
        pickle_weights(target, num_files=3, **rotary_frequencies(config.num_hidden_layers, config.head_dim))
        maps = {"d2t": torch.zeros(400, dtype=torch.int64), "t2d": torch.ones(400, dtype=torch.bool)}
        pickle_weights(tiny_eagle3(draft, config, rope_theta=None), **maps)
    else:
        AutoModelForCausalLM.from_pretrained(target).save_pretrained(target, max_shard_size="200KB")
        (target / "model.safetensors").unlink()
        pickle_weights(tiny_eagle3(draft, config, draft_vocab=100, rope_theta=None))


LOAD_PRESETS = f"""
import json
from engine import Engine, Request, SamplingParams, Speculation
greedy = SamplingParams(temperature=0.0, max_tokens={LENGTH})
chat = [{{"role": role, "content": "answers"}} for role in ("user", "assistant", "user")]
requests = [Request(token_ids=prompt, params=greedy) for prompt in {PROMPTS[:2]}] + [Request(messages=chat, params=greedy)]
answers = {{}}
for name in {list(CONFIGURATIONS)}:
    engine = Engine.load(name, dtype="float32", speculation=Speculation(top_k=4))
    results = engine.generate(requests)
    texts = [result.token_ids for result in results[:2]]
    drafted = sum(cycle.drafted for result in results for cycle in result.cycles)
    answers[name] = (texts, [engine.speculation.tree_size, engine.speculation.depth], drafted, results[2].prompt)
print(json.dumps(answers))
"""


def test_presets_from_a_hub(tmp_path):
    """Each by its name alone: found, downloaded, loaded, and its greedy texts transformers' own."""
    for name in CONFIGURATIONS:
        build_repositories(tmp_path / "hub", name)
    hub = TinyHub(tmp_path / "hub")
    answers = json.loads(hub.run(LOAD_PRESETS, tmp_path / "home"))
    hub.requests.clear()
    vicuna = PRESETS["vicuna-13b-v1.3"]
    pinned = ("vicuna-13b-v1.3", f"{vicuna.draft}@{hub.commit(vicuna.draft)}", hub.commit(vicuna.hub_id))
    hub.run(f"from engine import Engine; target, draft, commit = {pinned}; Engine.load(target, draft, revision=commit)", tmp_path / "home")
    assert hub.requests == [], "a worker that is told the commits asks nobody"
    hub.close()
    for name, (texts, shape, num_drafted, chat) in answers.items():
        assert texts == reference_texts(tmp_path / "hub" / PRESETS[name].hub_id, PROMPTS[:2]), name
        assert shape == [60, 8] and num_drafted > 0
        assert chat.count("<s>") == 1
    assert len(answers) == len(CONFIGURATIONS)


VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


@pytest.mark.parametrize("legacy", [True, False, None])
def test_vicunas_template(legacy, tmp_path):
    """One BOS, and the ids that Vicuna was trained on: SentencePiece's, of each text between special tokens by itself."""
    folder = tiny_target(tmp_path / "vicuna", vocab=400)
    processor = save_sentencepiece(folder, 400)
    if legacy is not None:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "legacy": legacy}))
    tokenizer = load_tokenizer(folder, PRESETS["vicuna-13b-v1.3"].chat_template)

    def encode(*messages: str, system: str | None = None) -> list[int]:
        chat = [{"role": ("user", "assistant")[place % 2], "content": content} for place, content in enumerate(messages)]
        if system is not None:
            chat.insert(0, {"role": "system", "content": system})
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    assert encode("Hi.") == [1, *processor.encode(f"{VICUNA_SYSTEM} USER: Hi. ASSISTANT:")]
    assert encode("Hi.", "Hello!", "And  now?", system="Be brief.") == [
        1,
        *processor.encode("Be brief. USER: Hi. ASSISTANT: Hello!"),
        2,
        *processor.encode("USER: And  now? ASSISTANT:"),
    ]
    for roles in (["assistant"], ["user", "user"], ["system", "assistant"], ["user", "system"]):
        with pytest.raises(TemplateError, match="user and assistant take turns"):
            tokenizer.apply_chat_template([{"role": role, "content": "x"} for role in roles], tokenize=False)
