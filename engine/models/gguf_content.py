"""What a GGUF file holds, in transformers' terms: a config.json, and tensors by their names there. Imports no torch until tensors are read.

Nothing is passed over: a field or a tensor that this file does not know may change the mathematics, and is refused by name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

from engine.errors import UserError
from engine.models.gguf_tokenizer import check_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

#: general.architecture -> architecture in transformers. A Mistral is a "llama" there: without a window the two are the same.
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

#: field behind "llama." -> field of config.json
_SIZES = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}

#: fields that are optional; a tuple has the values that change nothing
_OTHER_FIELDS: dict[str, tuple | None] = {
    "attention.head_count_kv": None,
    "attention.layer_norm_rms_epsilon": None,
    "attention.key_length": None,
    "attention.value_length": None,
    "rope.freq_base": None,
    "rope.dimension_count": None,
    "vocab_size": None,
    "tensor_data_layout": None,
    "rope.scaling.type": ("none",),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
}

#: tensor without its "weight" or "bias" -> name in transformers
_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"


class GGUFModel:
    """A language model in a GGUF file.

    fields: the file's metadata. config: what its config.json would be.
    Raises UserError that names what the engine cannot run exactly.
    """

    def __init__(self, file: Path):
        self._file = file
        try:
            reader = gguf.GGUFReader(file)
        except (ValueError, IndexError, KeyError, OSError) as error:
            raise UserError(f"'{file}' cannot be read as GGUF: {type(error).__name__}: {error}") from None
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.fields = {name: field.contents() for name, field in reader.fields.items()}
        self._architecture = self.fields.get("general.architecture")
        if self._architecture not in _ARCHITECTURES:
            raise self._refuse("general.architecture", ", ".join(_ARCHITECTURES))
        if self.fields.get("split.count", 1) != 1:
            raise self._refuse("split.count", "a model in one file")
        if "token_embd.weight" not in self._tensors:
            raise UserError(f"'{file}' has no tensor token_embd.weight; allowed: a whole language model")
        self._check_fields()
        check_tokenizer(file, self.fields)
        self._names = {name: self._rename(name) for name in self._tensors if name != _ROPE_FACTORS}
        self.config = self._make_config()

    def read_tensors(self) -> dict[str, Tensor]:
        """By transformers' names; fp32 where the file has quantised numbers, else the file's own type."""
        import torch

        types = {gguf.GGMLQuantizationType.F16: torch.float16, gguf.GGMLQuantizationType.BF16: torch.bfloat16}
        tensors = {}
        for name, new_name in self._names.items():
            tensor = self._tensors[name]
            try:
                values = gguf.dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError:
                raise UserError(f"'{self._file}': tensor {name} is of type {tensor.tensor_type.name}, which gguf cannot unpack") from None
            value = torch.from_numpy(np.array(values)).to(types.get(tensor.tensor_type, torch.float32))
            if self._architecture == "llama" and re.search(r"\.attn_[qk]\.", name):
                heads = self.config["num_attention_heads" if ".attn_q." in name else "num_key_value_heads"]
                # of each head, the rotary pairs lie side by side in the file, and D/2 apart in transformers
                value = value.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
            tensors[new_name] = value.contiguous()
        return tensors

    def _get(self, name: str, default: Any = None) -> Any:
        return self.fields.get(f"{self._architecture}.{name}", default)

    def _refuse(self, field: str, allowed: str) -> UserError:
        return UserError(f"'{self._file}': {field}={self.fields.get(field)!r}; allowed: {allowed}")

    def _check_fields(self) -> None:
        for name in _SIZES:
            if not isinstance(self._get(name), int):
                raise self._refuse(f"{self._architecture}.{name}", "an integer")
        for full_name, value in self.fields.items():
            prefix, _, name = full_name.partition(".")
            if prefix != self._architecture or name in _SIZES:
                continue
            if name not in _OTHER_FIELDS:
                raise self._refuse(full_name, "not set (this field is unknown here, and may change the model)")
            plain = _OTHER_FIELDS[name]
            if plain is not None and value not in plain:
                raise self._refuse(full_name, " or ".join(map(str, plain)))

    def _rename(self, name: str) -> str:
        stem, _, kind = name.rpartition(".")
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if kind in ("weight", "bias"):
            if layer is not None and layer[2] in _LAYER_TENSORS:
                return f"model.layers.{layer[1]}.{_LAYER_TENSORS[layer[2]]}.{kind}"
            if stem in _TENSORS:
                return f"{_TENSORS[stem]}.{kind}"
        raise UserError(f"'{self._file}': unknown tensor {name}; allowed: those of {', '.join(_ARCHITECTURES)}")

    def _make_config(self) -> dict[str, Any]:
        config = {"architectures": [_ARCHITECTURES[self._architecture]], "model_type": self._architecture, "dtype": "float32"}
        config |= {new_name: self._get(name) for name, new_name in _SIZES.items()}
        heads = config["num_attention_heads"]
        head_dim = self._get("attention.key_length", config["hidden_size"] // heads)
        for name in ("attention.value_length", "rope.dimension_count"):
            if self._get(name, head_dim) != head_dim:
                raise self._refuse(f"{self._architecture}.{name}", f"{head_dim}, the size of a head")
        rope_theta = self._get("rope.freq_base", 10000.0)
        rope = {"rope_theta": rope_theta, "rope_type": "default"}
        if _ROPE_FACTORS in self._tensors:
            rope |= self._find_llama3_scaling(np.array(self._tensors[_ROPE_FACTORS].data), rope_theta, head_dim)
        token = {name: self.fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "padding")}
        ends = [end for end in dict.fromkeys((token["eos"], token["eot"])) if end is not None]
        return config | {
            "vocab_size": int(self._tensors["token_embd.weight"].shape[1]),
            "num_key_value_heads": self._get("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "rms_norm_eps": self._get("attention.layer_norm_rms_epsilon"),
            "rope_parameters": rope,
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "bos_token_id": token["bos"],
            "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
            "pad_token_id": token["padding"],
        }

    def _find_llama3_scaling(self, factors: np.ndarray, rope_theta: float, head_dim: int) -> dict[str, Any]:
        """The file divides each rotary frequency by a factor; Llama 3 has them from four numbers, three of which are always the same."""
        factor, low, high, length = float(factors.max()), 1.0, 4.0, 8192
        waves = 2 * np.pi * rope_theta ** (np.arange(0, head_dim, 2) / head_dim)
        smooth = np.clip((length / waves - low) / (high - low), 0, 1)
        if not np.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
            raise UserError(
                f"'{self._file}': tensor {_ROPE_FACTORS} is not the scaling of Llama 3 (8192 tokens, 1, 4); allowed: that or none"
            )
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": length,
        }
