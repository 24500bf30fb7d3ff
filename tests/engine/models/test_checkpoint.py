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


@pytest.mark.parametrize("content", [{"state_dict": {"fc.weight": torch.zeros(2)}}, {"fc.weight": torch.zeros(2), "step": 3}, [1]])
def test_pytorch_bin_of_other_things(draft, content):
    torch.save(content, draft / "pytorch_model.bin")
    (draft / "model.safetensors").unlink()
    assert "'pytorch_model.bin' holds other things than named tensors" in refusal(draft)


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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("norm_before_residual", 1),
        ("norm_output", "true"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("qkv_bias", True),
        ("hidden_act", "gelu"),
        ("model_type", "gemma2"),
        ("layer_types", ["sliding_attention"]),
        ("sliding_window", 4096),
        ("use_sliding_window", True),
        ("partial_rotary_factor", 0.5),
        ("rms_norm_eps", "1e-5"),
        ("hidden_size", 0),
        ("max_position_embeddings", 2048.5),
        ("head_dim", 7),
        ("num_key_value_heads", 3),
        ("target_hidden_size", "32"),
    ],
)
def test_config_that_is_not_implemented(draft, field, value):
    edit_config(draft, **{field: value})
    assert f"config.json has {field}={value!r}; allowed: " in refusal(draft)


@pytest.mark.parametrize(
    ("field", "value"),
    [("use_aux_hidden_state", False), ("use_last_layernorm", False), ("use_mtp_layernorm", True), ("parallel_draft_step", 2)],
)
def test_eagle_config_that_is_not_implemented(draft, field, value):
    edit_config(draft, eagle_config={field: value})
    assert f"config.json has {field}={value!r}; allowed: not set or " in refusal(draft)


@pytest.mark.parametrize(
    ("field", "value"),
    [("logit_scale", 0.5), ("residual_multiplier", 2), ("use_aux_norm", True), ("attn_output_gate", False), ("truncated_vocab_size", 20)],
)
@pytest.mark.parametrize("section", [None, "eagle_config"])
def test_unknown_field(draft, field, value, section):
    """A name does not tell whether it changes the mathematics, and nor does the value: `is_causal: false` would."""
    edit_config(draft, **({field: value} if section is None else {section: {field: value}}))
    assert f"config.json has {field}={value!r}; allowed: no field of this name; if it does not change the mathematics" in refusal(draft)


def test_two_values_of_one_field(draft):
    edit_config(draft, norm_before_fc=False, eagle_config={"norm_before_fc": True})
    assert "norm_before_fc=True and norm_before_fc=False; they must agree" in refusal(draft)


def test_both_norms_before_fc(draft):
    edit_config(draft, norm_before_fc=True, fc_norm=True)
    assert "norm_before_fc=True; allowed: false, as fc_norm is true" in refusal(draft)


def test_norms_without_their_tensors(draft):
    edit_config(draft, fc_norm=True)
    assert "missing tensors: fc_norm.0.weight [32], fc_norm.1.weight [32], fc_norm.2.weight [32]" in refusal(draft)
    edit_config(draft, fc_norm=False, norm_before_fc=True)
    assert "missing tensors: input_norm.weight [96]" in refusal(draft)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"rope_theta": -1}, "rope_theta=-1; allowed: a rope_theta > 1"),
        ({"rope_theta": "1e4"}, "rope_theta='1e4'; allowed: a rope_theta > 1"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "allowed: the same base as in rope_theta, 10000.0"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "allowed: one rope_type of default, linear, llama3, yarn"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "one rope_type of default, linear, llama3, yarn"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "one rope_type of"),
        ({"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}}, "one rope_type of"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear'; allowed: a JSON object"),
        ({"rope_scaling": {"rope_type": "linear"}}, "for rope_type linear, besides rope_theta: factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor: a number > 0"),
        ({"rope_scaling": {"mrope_section": [1, 1], "rope_type": "default"}}, "for rope_type default, besides rope_theta: nothing"),
        ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": None}}, "for rope_type llama3, besides rope_theta: factor, low"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "a high_freq_factor above low_freq_factor"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": 1}},
            "truncate: true or false",
        ),
        ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}}, "allowed: the same as in rope_parameters"),
    ],
)
def test_rope_that_is_not_implemented(draft, fields, complaint):
    edit_config(draft, **fields)
    message = refusal(draft)
    assert complaint in message and "config.json has rope_" in message


@pytest.mark.parametrize("field", ["hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"])
def test_config_without_a_size(tmp_path, field):
    assert f"no {field}" in refusal(tiny_eagle3(tmp_path / "draft", TARGET, draft_vocab=20, **{field: None}))


def test_plain_values_of_every_flag_load(draft):
    expected = load(draft)
    edit_config(
        draft,
        _name_or_path="somewhere",
        architectures=["Qwen3ForCausalLM"],
        attention_bias=False,
        layer_types=["full_attention"],
        model_type="qwen3",
        norm_before_residual=False,
        norm_output=False,
        num_hidden_layers=40,
        partial_rotary_factor=1.0,
        rope_scaling=None,
        sliding_window=4096,
        target_hidden_size=None,
        use_sliding_window=False,
        unknown_here=None,
        eagle_config={"use_aux_hidden_state": True, "use_last_layernorm": True, "parallel_draft_step": 1},
    )
    found = load(draft)
    assert found.config == expected.config
    assert all(torch.equal(found.state_dict()[name], tensor) for name, tensor in expected.state_dict().items())


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
