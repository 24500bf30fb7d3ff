"""Random models small enough to build in a test: a target with a word tokenizer, and an EAGLE-3 head for it.

The tokenizer's words are "w3", "w4", ... (id 0 <unk>, 1 <s> BOS, 2 </s> EOS); "w3 w7" is ids 3, 7. Every vocabulary from 8 on will do.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

_LETTERS = "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful answers. USER: ASSISTANT:"

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %} {{ message['content'] }} {{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %} w3{% endif %}"
)


#: architecture -> its configuration class, and what its real models have that a plain Llama has not
_ARCHITECTURES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, {"sliding_window": None, "head_dim": 12}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
}


#: rotary scaling as Llama 3.1 configures it
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def tiny_target(
    folder: Path,
    architecture: str = "llama",
    *,
    vocab: int = 32,
    hidden: int = 32,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
    scale: float = 0.3,
    **config: Any,
) -> Path:
    """Saves a random model (fp32, tied embeddings unless `config` says otherwise) with its tokenizer in `folder` and returns it.

    architecture: llama, mistral, qwen2 or qwen3. config: further fields of config.json.
    scale: standard deviation of the weights; 0.3 gives laws that are neither flat nor one-hot.
    """
    kind, special = _ARCHITECTURES[architecture]
    fields = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 512,
        "initializer_range": scale,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        **special,
        **config,
    }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(kind(**fields))
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # begun as zeros and ones, under which a mistake would not show
            if name.endswith("bias"):
                parameter.normal_(std=scale)
            if "q_norm" in name or "k_norm" in name:
                parameter.add_(torch.randn_like(parameter), alpha=scale)
    model.save_pretrained(folder)
    save_word_tokenizer(folder, vocab)
    return folder


def tiny_llama(folder: Path, **options: Any) -> Path:
    """`tiny_target` of the architecture that most tests need."""
    return tiny_target(folder, "llama", **options)


def save_word_tokenizer(folder: Path, vocab: int) -> None:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(_words(vocab))}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def save_sentencepiece(folder: Path, vocab: int) -> SentencePieceProcessor:
    """Writes the tokenizer files of a Vicuna: a SentencePiece model without tokenizer.json, and no chat template; returns the model.

    vocab: at least 400 (ids 0 <unk>, 1 <s>, 2 </s>, then one for each byte).
    """
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter([_LETTERS]),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        minloglevel=2,
    )
    for name in ("tokenizer.json", "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    special = {name: _added_token(word) for name, word in (("unk_token", "<unk>"), ("bos_token", "<s>"), ("eos_token", "</s>"))}
    options = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False, "pad_token": None, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(options), encoding="utf-8")
    return SentencePieceProcessor(model_proto=model.getvalue())


def pickle_weights(folder: Path, num_files: int = 1, **more: torch.Tensor) -> None:
    """Puts the weights of a folder, and `more` tensors, into pytorch_model.bin, or into several files with their index."""
    tensors = {**load_file(folder / "model.safetensors"), **more}
    (folder / "model.safetensors").unlink()
    if num_files == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return
    files = {name: f"pytorch_model-{number % num_files + 1:05}-of-{num_files:05}.bin" for number, name in enumerate(tensors)}
    for file in set(files.values()):
        torch.save({name: tensor for name, tensor in tensors.items() if files[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}), encoding="utf-8")


def rotary_frequencies(num_layers: int, head_dim: int) -> dict[str, torch.Tensor]:
    """What old versions of transformers saved with each layer. Wrong numbers: nobody may use them."""
    return {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.rand(head_dim // 2) for layer in range(num_layers)}


def tiny_eagle3(
    folder: Path, target_config: PreTrainedConfig, draft_vocab: int | None = None, seed: int = 0, scale: float = 0.3, **config: Any
) -> Path:
    """Saves a random EAGLE-3 head (fp32, official layout) for `target_config` in `folder` and returns it.

    draft_vocab: size of its vocabulary, a random subset of the target's; None: all of it, without d2t.
    config: fields of config.json to set, or to leave out when None.
    """
    H, V = target_config.hidden_size, target_config.vocab_size
    U = draft_vocab or V
    fields: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": H,
        "intermediate_size": 2 * H,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": V,
        "draft_vocab_size": U,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        **config,
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    head_dim = H // 4
    tensors = {
        "fc.weight": random(H, 3 * H) / 3,
        "midlayer.self_attn.q_proj.weight": random(4 * head_dim, 2 * H),
        "midlayer.self_attn.k_proj.weight": random(2 * head_dim, 2 * H),
        "midlayer.self_attn.v_proj.weight": random(2 * head_dim, 2 * H),
        "midlayer.self_attn.o_proj.weight": random(H, 4 * head_dim),
        "midlayer.mlp.gate_proj.weight": random(2 * H, H),
        "midlayer.mlp.up_proj.weight": random(2 * H, H),
        "midlayer.mlp.down_proj.weight": random(H, 2 * H),
        "midlayer.input_layernorm.weight": 1 + random(H),
        "midlayer.hidden_norm.weight": 1 + random(H),
        "midlayer.post_attention_layernorm.weight": 1 + random(H),
        "norm.weight": 1 + random(H),
        "lm_head.weight": random(U, H),
    }
    if draft_vocab is not None and U != V:
        used = torch.randperm(V, generator=generator)[:U].sort().values
        tensors["d2t"] = used - torch.arange(U)
        tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, used, True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


def _added_token(word: str) -> dict[str, Any]:
    return {"__type": "AddedToken", "content": word, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}


def _words(vocab: int) -> list[str]:
    return ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(3, vocab))]
