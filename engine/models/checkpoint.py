"""Reads an EAGLE-3 head in the official layout, strictly: whatever is missing, unknown or misshapen is refused by name (LAW.md 1.5).

Shapes: H hidden size, V the target's vocabulary, U the draft's vocabulary.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedConfig

from engine.errors import UserError
from engine.models.eagle3 import Eagle3Head
from engine.models.eagle3_config import Eagle3Config, check_fits_target, read_eagle3_config
from engine.models.folder import find_weights

OPTIONAL_TENSORS = ("d2t", "t2d", "embed_tokens.weight")


def load_eagle3(
    path: Path, *, target_config: PreTrainedConfig, embedding: Tensor, dtype: torch.dtype, device: torch.device | str
) -> Eagle3Head:
    """The head in folder `path`, for a target with `target_config`.

    embedding: the target's token embedding [V, H]; shared, unless the file brings a different one of its own, which then is used,
        as the reference does.
    Raises UserError that names the tensor or the field of config.json, both values, and what is allowed.
    """
    config = read_eagle3_config(path)
    check_fits_target(
        config,
        path,
        hidden_size=target_config.hidden_size,
        vocab_size=target_config.vocab_size,
        num_hidden_layers=target_config.num_hidden_layers,
    )
    tensors = read_tensors(path)
    _refuse_other_formats(tensors, config, path)
    head_dim = _find_head_dim(tensors, config, path)
    _check_tensors(tensors, config, head_dim, path)
    targets_U = read_vocabulary_map(tensors, config, path)
    own = tensors.get("embed_tokens.weight")
    if own is not None:
        own = own.to(embedding)
        if not torch.equal(own, embedding):
            embedding = own
    with torch.device("meta"):
        head = Eagle3Head(
            config,
            head_dim=head_dim,
            num_target_layers=target_config.num_hidden_layers,
            embedding_VH=embedding.detach().to(device=device, dtype=dtype),
            d2t_U=targets_U.to(device),
        )
    weights = {name: t.to(device=device, dtype=dtype) for name, t in tensors.items() if name not in OPTIONAL_TENSORS}
    head.load_state_dict(weights, assign=True)
    return head.eval().requires_grad_(False)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of model.safetensors, else pytorch_model.bin (tensors only: no code in it is run). Raises UserError."""
    file = find_weights(folder)
    if file.name.endswith(".index.json"):
        raise UserError(f"draft '{folder}': '{file.name}' splits the weights over several files; allowed: one file")
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        return torch.load(file, map_location="cpu", weights_only=True)
    except (safetensors.SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise UserError(f"draft '{folder}': '{file.name}' cannot be read: {str(error).splitlines()[0]}") from None


def read_vocabulary_map(tensors: dict[str, Tensor], config: Eagle3Config, path: Path) -> Tensor:
    """The target's id of each draft token, int64 [U]: u + d2t[u].

    Example: a draft vocabulary of target tokens 0, 3, 4 has d2t = [0, 2, 2].
    Raises UserError with the first offending draft ids when two draft tokens are one target token or one is out of range, when d2t is
    missing though the vocabularies differ, and when t2d lists other tokens.
    """
    U, V = config.draft_vocab_size, config.vocab_size
    offset_U = tensors.get("d2t")
    if offset_U is None:
        if U != V:
            raise UserError(f"draft '{path}': no tensor d2t, though draft_vocab_size={U} differs from vocab_size={V}")
        offset_U = torch.zeros(U, dtype=torch.int64)
    if offset_U.is_floating_point() or offset_U.dtype == torch.bool:
        raise UserError(f"draft '{path}': d2t has type {offset_U.dtype}; allowed: integers")
    target_U = torch.arange(U) + offset_U.long()
    outside = ((target_U < 0) | (target_U >= V)).nonzero().flatten()
    if len(outside):
        raise UserError(
            f"draft '{path}': d2t maps draft ids {outside[:5].tolist()} to target ids {target_U[outside[:5]].tolist()}; "
            f"allowed: 0 to vocab_size-1 = {V - 1}"
        )
    taken = torch.bincount(target_U, minlength=V)
    repeated = (taken[target_U] > 1).nonzero().flatten()
    if len(repeated):
        raise UserError(
            f"draft '{path}': d2t maps several draft ids to one target id: draft ids {repeated[:5].tolist()} "
            f"to target ids {target_U[repeated[:5]].tolist()}; allowed: each target id at most once"
        )
    if U == V and bool(offset_U.any()):  # the reference ignores d2t here, others apply it: no reading is safe
        raise UserError(
            f"draft '{path}': d2t is not zero at draft ids {offset_U.nonzero().flatten()[:5].tolist()}, though "
            f"draft_vocab_size = vocab_size = {V}; allowed: zeros or no d2t (the vocabularies are one)"
        )
    t2d_V = tensors.get("t2d")
    if t2d_V is not None:
        differ = (t2d_V.bool() != taken.bool()).nonzero().flatten()
        if len(differ):
            raise UserError(f"draft '{path}': t2d and d2t disagree on target ids {differ[:5].tolist()}; they must list the same tokens")
    return target_U


def _refuse_other_formats(tensors: dict[str, Tensor], config: Eagle3Config, path: Path) -> None:
    """Heads of another kind have tell-tale names and sizes; saying so helps more than a list of missing tensors."""
    H = config.hidden_size
    fc = tensors.get("fc.weight")
    fc_inputs = fc.shape[1] if fc is not None and fc.dim() == 2 else None
    numbered = sorted(name for name in tensors if name.startswith(("layers.", "model.layers.")))
    if fc_inputs == 2 * H:
        raise UserError(
            f"draft '{path}': fc.weight has shape {list(fc.shape)}, inputs of 2*hidden_size={2 * H}: an EAGLE-1/2 head, not EAGLE-3; "
            f"allowed: [{H}, {3 * H}]"
        )
    if numbered and not any(name.startswith("midlayer.") for name in tensors):
        kind = "an EAGLE-3 head in the speculators layout" if fc_inputs == 3 * H else "an EAGLE-1/2 head, not EAGLE-3"
        raise UserError(f"draft '{path}': tensor {numbered[0]} and no midlayer.*: {kind}; allowed: the official EAGLE-3 layout")


def _find_head_dim(tensors: dict[str, Tensor], config: Eagle3Config, path: Path) -> int:
    """config's head_dim, else that of q_proj: some drafts have one that is not hidden_size / heads."""
    if config.head_dim is not None:
        return config.head_dim
    name, heads = "midlayer.self_attn.q_proj.weight", config.num_attention_heads
    query = tensors.get(name)
    if query is None:
        return config.hidden_size // heads  # refused as missing by the caller's next check
    if query.shape[0] % (2 * heads):
        raise UserError(f"draft '{path}': {name} has shape {list(query.shape)}; its rows must be num_attention_heads={heads} even heads")
    return query.shape[0] // heads


def _expected_shapes(config: Eagle3Config, head_dim: int) -> dict[str, tuple[list[int], str]]:
    """Tensor name -> (its shape, the fields of config.json that say so)."""
    H, M = config.hidden_size, config.intermediate_size
    U, V = config.draft_vocab_size, config.vocab_size
    query, key = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    norm = ([H], "hidden_size")
    return {
        "fc.weight": ([H, 3 * H], "hidden_size, 3*hidden_size of the target"),
        "midlayer.input_layernorm.weight": norm,
        "midlayer.hidden_norm.weight": norm,
        "midlayer.self_attn.q_proj.weight": ([query, 2 * H], "num_attention_heads*head_dim, 2*hidden_size"),
        "midlayer.self_attn.k_proj.weight": ([key, 2 * H], "num_key_value_heads*head_dim, 2*hidden_size"),
        "midlayer.self_attn.v_proj.weight": ([key, 2 * H], "num_key_value_heads*head_dim, 2*hidden_size"),
        "midlayer.self_attn.o_proj.weight": ([H, query], "hidden_size, num_attention_heads*head_dim"),
        "midlayer.post_attention_layernorm.weight": norm,
        "midlayer.mlp.gate_proj.weight": ([M, H], "intermediate_size, hidden_size"),
        "midlayer.mlp.up_proj.weight": ([M, H], "intermediate_size, hidden_size"),
        "midlayer.mlp.down_proj.weight": ([H, M], "hidden_size, intermediate_size"),
        "norm.weight": norm,
        "lm_head.weight": ([U, H], "draft_vocab_size, hidden_size"),
        "d2t": ([U], "draft_vocab_size"),
        "t2d": ([V], "vocab_size"),
        "embed_tokens.weight": ([V, H], "vocab_size, hidden_size"),
    }


def _check_tensors(tensors: dict[str, Tensor], config: Eagle3Config, head_dim: int, path: Path) -> None:
    expected = _expected_shapes(config, head_dim)
    missing = [name for name in expected if name not in tensors and name not in OPTIONAL_TENSORS]
    if missing:
        shapes = ", ".join(f"{name} {expected[name][0]}" for name in missing)
        raise UserError(f"draft '{path}': missing tensors: {shapes}")
    unknown = sorted(name for name in tensors if name not in expected)
    if unknown:
        shapes = ", ".join(f"{name} {list(tensors[name].shape)}" for name in unknown)
        raise UserError(f"draft '{path}': unknown tensors: {shapes}; allowed: {', '.join(expected)}")
    for name, (shape, fields) in expected.items():
        if name in tensors and list(tensors[name].shape) != shape:
            raise UserError(f"draft '{path}': {name} has shape {list(tensors[name].shape)}; allowed: {shape} ({fields} in config.json)")
