"""Writes a random Llama as a GGUF file with Q4_1 matrices and a byte-level tokenizer, as llama.cpp's converter would."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 64, 96, 3, 4, 2
CHAT_TEMPLATE = "{% for message in messages %}{{ '<|im_start|>' + message['content'] + '<|im_end|>' }}{% endfor %}"


def write_tiny_gguf(path: Path, seed: int = 0) -> dict[str, Tensor]:
    """Returns the weights by Llama's names in transformers, as a reader must find them (dequantised, rotary layout by halves)."""
    tokens = byte_tokens()
    vocab = len(tokens)
    generator = torch.Generator().manual_seed(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token.startswith("<|") else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges(["\u0120 \u0120"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)

    expected: dict[str, Tensor] = {}

    def add_matrix(name: str, llama_name: str, rows: int, columns: int, heads: int | None = None) -> None:
        packed = gguf.quants.quantize(torch.randn(rows, columns, generator=generator).numpy(), gguf.GGMLQuantizationType.Q4_1)
        writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
        value = torch.from_numpy(gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q4_1))
        if heads is not None:  # in the file channels i and i + D/2 lie side by side
            value = value.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        expected[llama_name] = value

    def add_norm(name: str, llama_name: str) -> None:
        value = torch.rand(HIDDEN, generator=generator)
        writer.add_tensor(name, value.numpy().astype(np.float32))
        expected[llama_name] = value

    add_matrix("token_embd.weight", "model.embed_tokens.weight", vocab, HIDDEN)
    add_norm("output_norm.weight", "model.norm.weight")
    key_rows = HIDDEN // HEADS * KV_HEADS
    for i in range(LAYERS):
        block, layer = f"blk.{i}", f"model.layers.{i}"
        add_norm(f"{block}.attn_norm.weight", f"{layer}.input_layernorm.weight")
        add_norm(f"{block}.ffn_norm.weight", f"{layer}.post_attention_layernorm.weight")
        add_matrix(f"{block}.attn_q.weight", f"{layer}.self_attn.q_proj.weight", HIDDEN, HIDDEN, HEADS)
        add_matrix(f"{block}.attn_k.weight", f"{layer}.self_attn.k_proj.weight", key_rows, HIDDEN, KV_HEADS)
        add_matrix(f"{block}.attn_v.weight", f"{layer}.self_attn.v_proj.weight", key_rows, HIDDEN)
        add_matrix(f"{block}.attn_output.weight", f"{layer}.self_attn.o_proj.weight", HIDDEN, HIDDEN)
        add_matrix(f"{block}.ffn_gate.weight", f"{layer}.mlp.gate_proj.weight", INNER, HIDDEN)
        add_matrix(f"{block}.ffn_up.weight", f"{layer}.mlp.up_proj.weight", INNER, HIDDEN)
        add_matrix(f"{block}.ffn_down.weight", f"{layer}.mlp.down_proj.weight", HIDDEN, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def byte_tokens() -> list[str]:
    """<|im_start|>, <|im_end|>, the 256 byte letters of GPT-2's alphabet, and two spaces as one token."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    letters = {**{b: chr(b) for b in plain}, **{b: chr(256 + i) for i, b in enumerate(others)}}
    return ["<|im_start|>", "<|im_end|>", *(letters[b] for b in range(256)), "\u0120\u0120"]
