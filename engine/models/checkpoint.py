"""Reads an EAGLE-3 head of any layout, strictly: whatever is missing, unknown or misshapen is refused by name (LAW.md 1.5).

Shapes: H hidden size of the head, V the target's vocabulary, U the draft's vocabulary.
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
from engine.models.eagle3_config import Eagle3Config, check_fits_target, default_feature_layers, read_eagle3_config
from engine.models.eagle3_layouts import to_official_names
from engine.models.folder import find_weights
from engine.models.tensor_names import check_state_dict

OPTIONAL_TENSORS = {"d2t", "t2d", "embed_tokens.weight"}  # the last only in a head as wide as its target


def load_eagle3(
    path: Path, *, target_config: PreTrainedConfig, embedding: Tensor, dtype: torch.dtype, device: torch.device | str
) -> Eagle3Head:
    """The head in folder `path`, for a target with `target_config`.

    embedding: the target's token embedding; shared, unless the file brings a different one of its own, which then is used, as the
        reference does. A head narrower or wider than its target must bring one.
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
    tensors = to_official_names(read_tensors(path), config, path)
    _refuse_older_heads(tensors, config, path)
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
            feature_layers=config.feature_layers or default_feature_layers(target_config.num_hidden_layers),
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
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except (safetensors.SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise UserError(f"draft '{folder}': '{file.name}' cannot be read: {str(error).splitlines()[0]}") from None
    check_state_dict(tensors, f"draft '{folder}': '{file.name}'")
    return tensors


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


def _refuse_older_heads(tensors: dict[str, Tensor], config: Eagle3Config, path: Path) -> None:
    """EAGLE-1/2 heads norm no feature, and have tell-tale sizes; saying so helps more than a list of missing tensors (FIELD-CASES B24)."""
    if "midlayer.hidden_norm.weight" in tensors:
        return
    H = config.hidden_size
    for name, older, allowed in (
        ("fc.weight", [H, 2 * H], [H, config.num_features * config.target_hidden_size]),
        ("midlayer.self_attn.q_proj.weight", [H, H], [H, 2 * H]),
    ):
        if name in tensors and list(tensors[name].shape) == older:
            raise UserError(f"draft '{path}': {name} has shape {older}: an EAGLE-1/2 head, not EAGLE-3; allowed: {allowed}")


def _find_head_dim(tensors: dict[str, Tensor], config: Eagle3Config, path: Path) -> int:
    """config's head_dim, else that of q_proj: some drafts have one that is not hidden_size / heads."""
    if config.head_dim is not None:
        return config.head_dim
    name, heads = "midlayer.self_attn.q_proj.weight", config.num_attention_heads
    query = tensors.get(name)
    if query is None:
        return config.hidden_size // heads  # refused as missing by the caller's next check
    if query.dim() != 2 or query.shape[0] % (2 * heads):
        raise UserError(f"draft '{path}': {name} has shape {list(query.shape)}; its rows must be num_attention_heads={heads} even heads")
    return query.shape[0] // heads


def _expected_shapes(config: Eagle3Config, head_dim: int) -> dict[str, tuple[list[int], str]]:
    """Tensor name -> (its shape, the fields of config.json that say so)."""
    H, M = config.hidden_size, config.intermediate_size
    feature, features = config.target_hidden_size, config.num_features * config.target_hidden_size
    U, V = config.draft_vocab_size, config.vocab_size
    query, key = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    norm = ([H], "hidden_size")
    features_field = f"{config.num_features}*hidden_size of the target"
    input_norm = {"input_norm.weight": ([features], features_field)} if config.norm_before_fc else {}
    fc_norms = range(config.num_features if config.fc_norm else 0)
    return {
        **input_norm,
        **{f"fc_norm.{i}.weight": ([feature], "hidden_size of the target") for i in fc_norms},
        "fc.weight": ([H, features], f"hidden_size, {features_field}"),
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
    has_target_width = config.hidden_size == config.target_hidden_size
    optional = OPTIONAL_TENSORS if has_target_width else OPTIONAL_TENSORS - {"embed_tokens.weight"}
    missing = [name for name in expected if name not in tensors and name not in optional]
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
