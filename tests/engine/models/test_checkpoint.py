"""Loading an EAGLE-3 head: what is right loads, everything else is refused by name."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from engine.errors import UserError
from engine.models.checkpoint import load_eagle3
from tests.tiny_models import tiny_eagle3

TARGET = LlamaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2)
EMBEDDING = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))


def load(folder, target_config=TARGET):
    return load_eagle3(folder, target_config=target_config, embedding=EMBEDDING, dtype=torch.float32, device="cpu")


@pytest.fixture
def draft(tmp_path):
    return tiny_eagle3(tmp_path / "draft", TARGET, draft_vocab=20)


def edit_tensors(folder, **changes):
    """Sets tensors of the file; dots are written as __, None drops one."""
    tensors = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        name = name.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refusal(folder, target_config=TARGET) -> str:
    with pytest.raises(UserError) as caught:
        load(folder, target_config)
    message = str(caught.value)
    assert str(folder) in message
    return message


def test_loads_with_target_ids_and_feature_layers(draft):
    head = load(draft)
    offsets = load_file(draft / "model.safetensors")["d2t"]
    assert head.d2t.tolist() == [i + offset for i, offset in enumerate(offsets.tolist())]
    assert head.feature_layers == (2, 3, 3)
    assert head.embedding_VH.data_ptr() == EMBEDDING.data_ptr()
    assert not head.training and not any(p.requires_grad for p in head.parameters())


def test_feature_layers_of_known_targets(draft):
    for layers, expected in ((30, (2, 15, 27)), (32, (2, 16, 29)), (40, (2, 20, 37)), (36, (2, 18, 33))):
        config = LlamaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=layers, num_attention_heads=4)
        assert load(draft, config).feature_layers == expected


def test_pytorch_bin_loads_the_same(draft):
    expected = load(draft).state_dict()
    torch.save(load_file(draft / "model.safetensors"), draft / "pytorch_model.bin")
    (draft / "model.safetensors").unlink()
    found = load(draft).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_pytorch_bin_with_code_is_not_run(draft, tmp_path):
    class Payload:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"fc.weight": Payload()}, draft / "pytorch_model.bin")
    (draft / "model.safetensors").unlink()
    assert "pytorch_model.bin" in refusal(draft)
    assert not (tmp_path / "ran").exists()


def test_cut_short_file(draft):
    file = draft / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors" in refusal(draft)


def test_missing_tensor(draft):
    edit_tensors(draft, midlayer__mlp__up_proj__weight=None)
    assert "missing tensors: midlayer.mlp.up_proj.weight [64, 32]" in refusal(draft)


def test_missing_q_proj(draft):
    edit_tensors(draft, midlayer__self_attn__q_proj__weight=None)
    assert "missing tensors: midlayer.self_attn.q_proj.weight [32, 64]" in refusal(draft)


def test_unknown_tensor(draft):
    edit_tensors(draft, fc__bias=torch.zeros(32))
    assert "unknown tensors: fc.bias [32]" in refusal(draft)


@pytest.mark.parametrize(
    ("name", "shape", "expected", "field"),
    [
        ("midlayer.self_attn.k_proj.weight", [8, 64], [16, 64], "num_key_value_heads"),
        ("midlayer.self_attn.q_proj.weight", [32, 32], [32, 64], "2*hidden_size"),
        ("midlayer.mlp.down_proj.weight", [32, 32], [32, 64], "intermediate_size"),
        ("lm_head.weight", [32, 32], [20, 32], "draft_vocab_size"),
        ("norm.weight", [16], [32], "hidden_size"),
        ("fc.weight", [32, 128], [32, 96], "3*hidden_size of the target"),
        ("d2t", [19], [20], "draft_vocab_size"),
        ("t2d", [31], [32], "vocab_size"),
        ("embed_tokens.weight", [31, 32], [32, 32], "vocab_size"),
    ],
)
def test_misshapen_tensor(draft, name, shape, expected, field):
    edit_tensors(draft, **{name: torch.zeros(shape)})
    message = refusal(draft)
    assert name in message and str(shape) in message and str(expected) in message and field in message


def test_q_proj_rows_are_no_heads(draft):
    edit_tensors(draft, midlayer__self_attn__q_proj__weight=torch.zeros(30, 64))
    message = refusal(draft)
    assert "midlayer.self_attn.q_proj.weight has shape [30, 64]" in message and "num_attention_heads=4" in message


def test_head_dim_follows_q_proj(draft):
    """hidden_size / heads would be 8; the file has heads of 4."""
    edit_tensors(
        draft,
        midlayer__self_attn__q_proj__weight=torch.zeros(16, 64),
        midlayer__self_attn__k_proj__weight=torch.zeros(8, 64),
        midlayer__self_attn__v_proj__weight=torch.zeros(8, 64),
        midlayer__self_attn__o_proj__weight=torch.zeros(32, 16),
    )
    assert load(draft).head_dim == 4
    edit_config(draft, head_dim=8)
    assert "midlayer.self_attn.q_proj.weight has shape [16, 64]; allowed: [32, 64]" in refusal(draft)


def test_d2t_repeats_a_token(draft):
    offsets = load_file(draft / "model.safetensors")["d2t"]
    offsets[7] = 5 + offsets[5] - 7
    edit_tensors(draft, d2t=offsets, t2d=None)
    message = refusal(draft)
    assert "d2t" in message and "draft ids [5, 7]" in message and str([5 + offsets[5].item()] * 2) in message


@pytest.mark.parametrize(("offset", "target_id"), [(-4, -1), (29, 32)])
def test_d2t_out_of_range(draft, offset, target_id):
    offsets = load_file(draft / "model.safetensors")["d2t"]
    offsets[3] = offset
    edit_tensors(draft, d2t=offsets)
    message = refusal(draft)
    assert f"d2t maps draft ids [3] to target ids [{target_id}]" in message and "31" in message


def test_d2t_missing(draft):
    edit_tensors(draft, d2t=None)
    message = refusal(draft)
    assert "d2t" in message and "draft_vocab_size=20" in message and "vocab_size=32" in message


def test_d2t_of_floats(draft):
    edit_tensors(draft, d2t=load_file(draft / "model.safetensors")["d2t"].float())
    assert "d2t has type torch.float32" in refusal(draft)


def test_t2d_disagrees(draft):
    t2d = load_file(draft / "model.safetensors")["t2d"]
    t2d[11] = ~t2d[11]
    edit_tensors(draft, t2d=t2d)
    assert "t2d and d2t disagree on target ids [11]" in refusal(draft)


@pytest.mark.parametrize("zeros", [False, True])
def test_equal_vocabularies_are_the_identity(tmp_path, zeros):
    folder = tiny_eagle3(tmp_path / "draft", TARGET)
    if zeros:
        edit_tensors(folder, d2t=torch.zeros(32, dtype=torch.int64))
    assert load(folder).d2t.tolist() == list(range(32))


def test_equal_vocabularies_with_a_permutation(tmp_path):
    folder = tiny_eagle3(tmp_path / "draft", TARGET)
    edit_tensors(folder, d2t=torch.tensor([1, -1] + [0] * 30))
    assert "d2t is not zero at draft ids [0, 1]" in refusal(folder)


@pytest.mark.parametrize(
    ("field", "change"),
    [("vocab_size", {"vocab_size": 40}), ("hidden_size", {"hidden_size": 64})],
)
def test_sizes_of_another_target(draft, field, change):
    config = LlamaConfig(**{"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4, **change})
    message = refusal(draft, config)
    assert f"config.json has {field}=32" in message and f"target has {field}={change[field]}" in message


def test_target_with_too_few_layers(draft):
    config = LlamaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    assert "num_hidden_layers=2" in refusal(draft, config)


def test_draft_vocabulary_larger_than_the_target(draft):
    edit_config(draft, draft_vocab_size=33)
    message = refusal(draft)
    assert "draft_vocab_size=33" in message and "vocab_size=32" in message


def test_eagle1_head_by_its_fc(draft):
    edit_tensors(draft, fc__weight=torch.zeros(32, 64))
    message = refusal(draft)
    assert "fc.weight has shape [32, 64]" in message and "EAGLE-1/2" in message


@pytest.mark.parametrize(("fc_inputs", "kind"), [(64, "EAGLE-1/2"), (None, "EAGLE-1/2"), (96, "speculators")])
def test_numbered_layers(draft, fc_inputs, kind):
    tensors = {name.replace("midlayer.", "layers.0."): t for name, t in load_file(draft / "model.safetensors").items()}
    del tensors["fc.weight"]
    if fc_inputs is not None:
        tensors["fc.weight"] = torch.zeros(32, fc_inputs)
    save_file(tensors, draft / "model.safetensors")
    assert kind in refusal(draft)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("norm_before_residual", True),
        ("norm_before_fc", True),
        ("fc_norm", True),
        ("norm_output", False),
        ("target_hidden_size", 32),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("hidden_act", "gelu"),
        ("num_hidden_layers", 2),
        ("model_type", "qwen3"),
        ("architectures", ["Eagle3Speculator"]),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 10000.0}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 5.0}),
        ("rope_theta", -1),
        ("rms_norm_eps", "1e-5"),
        ("hidden_size", 0),
        ("head_dim", 7),
        ("num_key_value_heads", 3),
        ("transformer_layer_config", {}),
        ("eagle_config", {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}),
    ],
)
def test_config_that_is_not_implemented(draft, field, value):
    edit_config(draft, **{field: value})
    message = refusal(draft)
    assert (field if field != "eagle_config" else "eagle_aux_hidden_state_layer_ids") in message


@pytest.mark.parametrize("field", ["hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"])
def test_config_without_a_size(tmp_path, field):
    assert f"no {field}" in refusal(tiny_eagle3(tmp_path / "draft", TARGET, draft_vocab=20, **{field: None}))


def test_plain_values_of_every_flag_load(draft):
    edit_config(
        draft,
        norm_before_residual=False,
        norm_output=True,
        target_hidden_size=None,
        rope_scaling=None,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 2]},
    )
    assert load(draft).config.aux_layer_ids == (1, 2, 2)


def test_key_value_heads_default_to_heads(draft):
    config = json.loads((draft / "config.json").read_text())
    del config["num_key_value_heads"]
    (draft / "config.json").write_text(json.dumps(config))
    assert "midlayer.self_attn.k_proj.weight has shape [16, 64]; allowed: [32, 64]" in refusal(draft)


def test_own_embedding_is_used_when_it_differs(draft):
    edit_tensors(draft, embed_tokens__weight=EMBEDDING.clone())
    assert load(draft).embedding_VH.data_ptr() == EMBEDDING.data_ptr()
    edit_tensors(draft, embed_tokens__weight=EMBEDDING + 1)
    assert torch.equal(load(draft).embedding_VH, EMBEDDING + 1)
