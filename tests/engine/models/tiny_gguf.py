"""Writes a model folder as a GGUF file, as llama.cpp's converter would: Q4_1 matrices, norms and biases in fp32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

CHAT_TEMPLATE = "{% for message in messages %}{{ '<|im_start|>' + message['content'] + '<|im_end|>' }}{% endfor %}"

#: config.json's model_type -> the name in the file, and the tensor names there
_ARCHITECTURES = {
    "llama": ("llama", gguf.MODEL_ARCH.LLAMA),
    "mistral": ("llama", gguf.MODEL_ARCH.LLAMA),
    "qwen2": ("qwen2", gguf.MODEL_ARCH.QWEN2),
    "qwen3": ("qwen3", gguf.MODEL_ARCH.QWEN3),
}


def write_gguf(path: Path, folder: Path, *, pre: str = "smollm", sentencepiece: Any = None, **fields: Any) -> dict[str, Tensor]:
    """Returns the weights by their names in transformers, as a reader must find them (dequantised).

    folder: a model whose matrices have multiples of 32 columns.
    pre: of a byte-level tokenizer with the tokens of `byte_tokens`. sentencepiece: a processor, whose tokenizer is written in its place.
    fields: further metadata, in the architecture's section, "__" for "." (rope__scaling__type="yarn").
    """
    config = json.loads((folder / "config.json").read_text())
    name, architecture = _ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, name)
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    for field, value in fields.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(f"{name}.{field.replace('__', '.')}", value)
    if sentencepiece is None:
        _add_byte_level(writer, pre)
    else:
        _add_sentencepiece(writer, sentencepiece)

    if config["rope_parameters"]["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(config))
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    expected: dict[str, Tensor] = {}
    for full_name, value in load_file(folder / "model.safetensors").items():
        stem, _, kind = full_name.rpartition(".")
        new_name = f"{names.get_name(stem)}.{kind}"
        if value.dim() == 1:
            writer.add_tensor(new_name, value.numpy())
            expected[full_name] = value
            continue
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(stem.rpartition(".")[2])
        turn = heads is not None and name == "llama"
        if turn:  # in the file channels i and i + D/2 of a head lie side by side
            value = value.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        packed = gguf.quants.quantize(value.numpy(), gguf.GGMLQuantizationType.Q4_1)
        writer.add_tensor(new_name, packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
        value = torch.from_numpy(gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q4_1))
        expected[full_name] = value.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2) if turn else value
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _add_byte_level(writer: gguf.GGUFWriter, pre: str) -> None:
    tokens = byte_tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token.startswith("<|") else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges(["\u0120 \u0120"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(1)
    if pre != "llama-bpe":  # of which the files say nothing
        writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _add_sentencepiece(writer: gguf.GGUFWriter, processor: Any) -> None:
    ids = range(processor.vocab_size())
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([processor.id_to_piece(i) for i in ids])
    writer.add_token_scores([processor.get_score(i) for i in ids])
    kinds = ((processor.is_unknown, "UNKNOWN"), (processor.is_control, "CONTROL"), (processor.is_byte, "BYTE"), (bool, "NORMAL"))
    writer.add_token_types([next((gguf.TokenType[name] for is_kind, name in kinds if is_kind(i)), gguf.TokenType.NORMAL) for i in ids])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def _llama3_factors(config: dict[str, Any]) -> np.ndarray:
    """By what each rotary frequency is divided: nothing below a wavelength, all of `factor` above another, and a ramp between."""
    rope, size = config["rope_parameters"], config["head_dim"]
    factors = []
    for i in range(0, size, 2):
        wave = 2 * np.pi * rope["rope_theta"] ** (i / size)
        ratio = rope["original_max_position_embeddings"] / wave
        if ratio > rope["high_freq_factor"]:
            factors.append(1.0)
        elif ratio < rope["low_freq_factor"]:
            factors.append(rope["factor"])
        else:
            part = (ratio - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            factors.append(1 / ((1 - part) / rope["factor"] + part))
    return np.array(factors, dtype=np.float32)


def byte_tokens() -> list[str]:
    """<|im_start|>, <|im_end|>, the 256 byte letters of GPT-2's alphabet, and two spaces as one token."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    letters = {**{b: chr(b) for b in plain}, **{b: chr(256 + i) for i, b in enumerate(others)}}
    return ["<|im_start|>", "<|im_end|>", *(letters[b] for b in range(256)), "\u0120\u0120"]
