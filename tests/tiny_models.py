"""Random models small enough to build in a test: a Llama target with a word tokenizer, and an EAGLE-3 head for it.

The tokenizer's words are "w3", "w4", ... (id 0 <unk>, 1 <s> BOS, 2 </s> EOS); "w3 w7" is ids 3, 7. Every vocabulary from 8 on will do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %} {{ message['content'] }} {{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %} w3{% endif %}"
)


def tiny_llama(
    folder: Path, vocab: int = 32, hidden: int = 32, layers: int = 4, heads: int = 4, kv_heads: int = 2, seed: int = 0, scale: float = 0.3
) -> Path:
    """Saves a random Llama (fp32, tied embeddings) with its tokenizer in `folder` and returns it.

    scale: standard deviation of the weights; 0.3 gives laws that are neither flat nor one-hot.
    """
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=512,
        initializer_range=scale,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(_words(vocab))}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def tiny_eagle3(
    folder: Path, target_config: LlamaConfig, draft_vocab: int | None = None, seed: int = 0, scale: float = 0.3, **config: Any
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


def _words(vocab: int) -> list[str]:
    return ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(3, vocab))]
