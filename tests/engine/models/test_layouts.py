"""One random head in every layout is one head, and what the layouts can get wrong is refused by name."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from engine.errors import UserError
from engine.models.checkpoint import load_eagle3
from engine.models.eagle3_config import check_fits_target, read_eagle3_config
from tests.engine.models.layouts import LAYOUTS, TARGET, as_older_head, read, rewrite, speculators, write
from tests.tiny_models import tiny_eagle3

EMBEDDING = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
TOKENS, POSITIONS = torch.tensor([3, 9, 4, 7, 7]), torch.arange(5)
FEATURES = torch.randn(5, 96, generator=torch.Generator().manual_seed(1))


def load(folder, target_config=TARGET):
    return load_eagle3(folder, target_config=target_config, embedding=EMBEDDING, dtype=torch.float32, device="cpu")


def causal_attend(query_NAD: Tensor, key_NGD: Tensor, value_NGD: Tensor) -> Tensor:
    query, key, value = (tensor.transpose(0, 1) for tensor in (query_NAD, key_NGD, value_NGD))
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(0, 1)


def two_steps(head) -> list[Tensor]:
    """Logits of a draft step from the target's features, and of the next from what the first hands on."""
    g = head(TOKENS, head.fuse(FEATURES), POSITIONS, causal_attend)
    return [head.logits(g), head.logits(head(TOKENS + 1, g, POSITIONS + 1, causal_attend))]


@pytest.fixture
def draft(tmp_path):
    return tiny_eagle3(tmp_path / "draft", TARGET, draft_vocab=20, seed=2)


def edit_config(folder, **changes):
    tensors, fields = read(folder)
    write(folder, tensors, {**fields, **changes})


def refusal(folder, target_config=TARGET) -> str:
    with pytest.raises(UserError) as caught:
        load(folder, target_config)
    assert f"draft '{folder}'" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("binary", [False, True])
def test_same_head_in_every_layout(draft, layout, binary):
    official = load(draft)
    rewrite(draft, layout)
    if binary:
        torch.save(load_file(draft / "model.safetensors"), draft / "pytorch_model.bin")
        (draft / "model.safetensors").unlink()
    head = load(draft)
    assert head.feature_layers == official.feature_layers == (2, 4, 5)
    assert torch.equal(head.d2t, official.d2t)
    assert torch.equal(head.fuse(FEATURES), official.fuse(FEATURES))
    for found, expected in zip(two_steps(head), two_steps(official), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("layout", ["speculators", "specforge"])
@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_output"])
def test_flags_are_read_in_every_layout(tmp_path, draft, layout, flag):
    plain = two_steps(load(draft))
    official = two_steps(load(tiny_eagle3(tmp_path / "flagged", TARGET, draft_vocab=20, seed=2, **{flag: True})))
    rewrite(draft, layout)
    edit_config(draft, **{flag: True})
    found = two_steps(load(draft))
    assert torch.equal(found[1], official[1]) and not torch.equal(found[1], plain[1])


@pytest.mark.parametrize("layout", ["speculators, by default", "vllm, running"])
@pytest.mark.parametrize("own_map", ["absent", "zeros"])
def test_identity_vocabulary_in_every_layout(tmp_path, layout, own_map):
    folder = tiny_eagle3(tmp_path / "draft", TARGET, seed=2)
    tensors, fields = read(folder)
    expected = two_steps(load(folder))
    tensors |= {"d2t": torch.zeros(32, dtype=torch.int64), "t2d": torch.ones(32, dtype=torch.bool)}
    tensors, fields = LAYOUTS[layout](tensors, fields)
    if own_map == "absent":
        tensors = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d", "draft_id_to_target_id")}
        fields["draft_vocab_size"] = None  # then vocab_size
    write(folder, tensors, fields)
    head = load(folder)
    assert head.d2t.tolist() == list(range(32))
    assert all(torch.equal(found, right) for found, right in zip(two_steps(head), expected, strict=True))


@pytest.mark.parametrize("layout", ["speculators", "vllm, running"])
def test_missing_map_is_refused_when_the_sizes_differ(draft, layout):
    rewrite(draft, layout)
    tensors, fields = read(draft)
    write(draft, {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "draft_id_to_target_id")}, fields)
    assert "no tensor d2t, though draft_vocab_size=20 differs from vocab_size=32" in refusal(draft)


def test_a_renamed_map_is_an_unknown_tensor(draft):
    tensors, fields = read(draft)
    tensors["draft_to_target"] = tensors.pop("d2t")
    write(draft, tensors, fields)
    assert "unknown tensors: draft_to_target [20]" in refusal(draft)


@pytest.mark.parametrize(("first", "second"), [("midlayer.", "layers.0."), ("", "model.")])
def test_one_tensor_under_two_names(draft, first, second):
    tensors, fields = read(draft)
    name = "midlayer.mlp.down_proj.weight"
    other = name.replace(first, second, 1)
    write(draft, {**tensors, other: tensors[name].clone()}, fields)
    message = refusal(draft)
    assert name in message and other in message and f"are both {name}" in message


@pytest.mark.parametrize(
    ("name", "rows", "rule"),
    [("self_attn.qkv_proj", 30, "multiple of 8 (4 of q_proj, 2 of k_proj, 2 of v_proj)"), ("mlp.gate_up_proj", 127, "multiple of 2")],
)
def test_fused_tensor_that_cannot_be_split(draft, name, rows, rule):
    rewrite(draft, "vllm, running")
    tensors, fields = read(draft)
    write(draft, {**tensors, f"model.layers.0.{name}.weight": torch.zeros(rows, 64)}, fields)
    message = refusal(draft)
    assert f"model.layers.0.{name}.weight has shape [{rows}, 64]" in message and rule in message


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("layers.1.self_attn.q_proj.weight", [32, 32]),  # more than one layer
        ("layers.0.self_attn.q_norm.weight", [8]),  # Qwen3's layer
        ("layers.0.self_attn.q_proj.bias", [32]),
        ("layers.0.mlp.up_proj.bias", [64]),
        ("fc.bias", [32]),
        ("fc_norm.0.weight", [32]),  # without the flag
        ("input_norm.weight", [96]),
        ("mask_hidden", [1, 1, 96]),  # parallel drafting
        ("verifier_lm_head.weight", [20, 32]),
    ],
)
def test_tensors_of_other_heads(draft, name, shape):
    rewrite(draft, "speculators")
    tensors, fields = read(draft)
    write(draft, {**tensors, name: torch.zeros(shape)}, fields)
    assert f"unknown tensors: {name.replace('layers.0.', 'midlayer.')} {shape}" in refusal(draft)


@pytest.mark.parametrize(("inputs_of_fc", "tell_tale"), [(64, "fc.weight has shape [32, 64]"), (None, "q_proj.weight has shape [32, 32]")])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_eagle_1_and_2_heads(draft, inputs_of_fc, tell_tale, prefix):
    as_older_head(draft, inputs_of_fc)
    tensors, fields = read(draft)
    write(draft, {prefix + name: tensor for name, tensor in tensors.items()}, fields)
    message = refusal(draft)
    assert tell_tale in message and "an EAGLE-1/2 head, not EAGLE-3" in message


@pytest.mark.parametrize(
    ("top", "nested", "expected"),
    [
        (None, None, (2, 4, 5)),
        ([], None, (2, 4, 5)),
        ([2, 4, 5], None, (2, 4, 5)),
        (None, [1, 3, 4], (2, 4, 5)),
        ([2, 4, 5], [1, 3, 4], (2, 4, 5)),
        ([0, 6, 7], None, (0, 6, 7)),
        (None, [0, 2, 6], (1, 3, 7)),
        ([1, 1, 5], None, (1, 1, 5)),
    ],
)
def test_layer_ids_count_inputs_at_the_top_and_outputs_in_eagle_config(draft, top, nested, expected):
    edit_config(draft, eagle_aux_hidden_state_layer_ids=top, eagle_config={"eagle_aux_hidden_state_layer_ids": nested})
    assert load(draft).feature_layers == expected


@pytest.mark.parametrize(
    ("top", "nested", "complaint"),
    [
        ([2, 4, 8], None, "the inputs of decoder layers [2, 4, 8]; allowed: 0 to num_hidden_layers-1 = 7"),
        (None, [1, 3, 7], "the inputs of decoder layers [2, 4, 8]"),
        ([5, 4, 2], None, "eagle_aux_hidden_state_layer_ids=[5, 4, 2]; allowed: integers >= 0 in rising order"),
        ([-1, 4, 5], None, "integers >= 0"),
        (None, [True, 4, 5], "eagle_config.eagle_aux_hidden_state_layer_ids=[True, 4, 5]; allowed: integers"),
        (None, 2, "eagle_config.eagle_aux_hidden_state_layer_ids=2; allowed: integers"),
        ([2, 4, 5], [2, 4, 5], "one less than each of eagle_aux_hidden_state_layer_ids"),
        ([2, 4, 5, 6], None, "fc.weight has shape [32, 96]; allowed: [32, 128] (hidden_size, 4*hidden_size of the target"),
    ],
)
def test_layer_ids_that_do_not_fit(draft, top, nested, complaint):
    edit_config(draft, eagle_aux_hidden_state_layer_ids=top, eagle_config={"eagle_aux_hidden_state_layer_ids": nested})
    assert complaint in refusal(draft)


@pytest.mark.parametrize("num_features", [1, 5])
def test_other_numbers_of_features(draft, num_features):
    tensors, fields = read(draft)
    tensors["fc.weight"] = torch.randn(32, 32 * num_features, generator=torch.Generator().manual_seed(4))
    ids = list(range(1, 1 + num_features))
    write(draft, tensors, {**fields, "eagle_aux_hidden_state_layer_ids": ids, "num_aux_hidden_states": num_features})
    head = load(draft)
    features = torch.randn(5, 32 * num_features, generator=torch.Generator().manual_seed(5))
    assert head.feature_layers == tuple(ids)
    torch.testing.assert_close(head.fuse(features), features @ tensors["fc.weight"].T)
    edit_config(draft, eagle_aux_hidden_state_layer_ids=None)  # which layers?
    assert f"num_aux_hidden_states={num_features}; allowed: 3" in refusal(draft)


def as_narrow_head(folder, own_embedding: bool):
    """A head of width 16 for the target of width 32."""
    tiny_eagle3(folder, LlamaConfig(vocab_size=32, hidden_size=16, num_attention_heads=4), draft_vocab=20, seed=2, target_hidden_size=32)
    tensors, fields = read(folder)
    generator = torch.Generator().manual_seed(3)
    tensors["fc.weight"] = torch.randn(16, 96, generator=generator)
    if own_embedding:
        tensors["embed_tokens.weight"] = torch.randn(32, 16, generator=generator)
    write(folder, tensors, fields)
    return folder


@pytest.mark.parametrize("layout", ["official", "speculators", "vllm, running"])
def test_head_narrower_than_its_target(tmp_path, layout):
    folder = as_narrow_head(tmp_path / "draft", own_embedding=True)
    expected, embedding = two_steps(load(folder)), read(folder)[0]["embed_tokens.weight"]
    if layout != "official":
        rewrite(folder, layout)
    head = load(folder)
    assert torch.equal(head.embedding_VH, embedding) and head.head_dim == 4
    assert all(torch.equal(found, right) for found, right in zip(two_steps(head), expected, strict=True))


def test_head_narrower_than_its_target_without_embedding(tmp_path):
    folder = as_narrow_head(tmp_path / "draft", own_embedding=False)
    assert "missing tensors: embed_tokens.weight [32, 16]" in refusal(folder)


def test_target_hidden_size_of_another_target(draft):
    edit_config(draft, target_hidden_size=48)
    assert "config.json has target_hidden_size=48, the target has hidden_size=32" in refusal(draft)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"norm_before_residual": None}, "no norm_before_residual; a head of speculators needs it"),
        ({"vocab_size": 33}, "vocab_size=32 and vocab_size=33; they must agree"),
        ({"speculators_model_type": "peagle"}, "speculators_model_type='peagle'; allowed: not set or 'eagle3'"),
        ({"transformer_layer_config": {}}, "no num_attention_heads"),
        ({"transformer_layer_config": "llama"}, "transformer_layer_config='llama'; allowed: a JSON object"),
    ],
)
def test_speculators_config_that_is_refused(draft, change, complaint):
    rewrite(draft, "speculators")
    edit_config(draft, **change)
    assert complaint in refusal(draft)


def test_config_says_the_trained_length(draft):
    assert load(draft).config.max_position_embeddings is None
    edit_config(draft, max_position_embeddings=2048)
    assert load(draft).config.max_position_embeddings == 2048
    write(draft, *speculators(*read(draft)))
    assert load(draft).config.max_position_embeddings == 2048


def test_official_heads_by_their_configuration(tmp_path):
    """config.json of the official heads (LAW.md 1.5): sizes are read as they are, and they fit their targets."""
    common = {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "initializer_range": 0.02, "model_type": "llama"}
    common |= {"max_position_embeddings": 2048, "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.28.1"}
    common |= {"use_cache": True, "pad_token_id": 0, "draft_vocab_size": 32000}
    llama = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    vicuna = {"hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40, "num_hidden_layers": 40, "vocab_size": 32000}
    for name, fields, layers in (("llama", {**llama, "num_hidden_layers": 1, "rms_norm_eps": 1e-5}, 32), ("vicuna", vicuna, 40)):
        folder = tmp_path / name
        folder.mkdir()
        write(folder, {}, {**common, **fields})
        config = read_eagle3_config(folder)
        check_fits_target(config, folder, hidden_size=fields["hidden_size"], vocab_size=fields["vocab_size"], num_hidden_layers=layers)
        assert (config.rope_theta, config.rope_scaling, config.draft_vocab_size) == (10000.0, {"rope_type": "default"}, 32000)
        assert config.num_key_value_heads == fields.get("num_key_value_heads", 40)
