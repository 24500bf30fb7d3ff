"""Loading a target: strict about its tensors, quiet on stderr."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import UserError
from engine.models.loading import encode_text, load_causal_lm, load_tokenizer, quiet_transformers
from tests.tiny_models import tiny_llama


@pytest.fixture
def folder(tmp_path):
    return tiny_llama(tmp_path / "target")


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder, **changes):
    tensors = load_file(folder / "model.safetensors")
    tensors.update(changes)
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors", metadata={"format": "pt"})


def refusal(folder) -> str:
    with pytest.raises(UserError) as caught:
        load_causal_lm(folder, torch.float32, "cpu")
    assert str(folder) in str(caught.value)
    return str(caught.value)


def test_loads_without_gradients_and_without_a_word(folder, capfd):
    model = load_causal_lm(folder, torch.bfloat16, "cpu")
    assert model.dtype == torch.bfloat16 and not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert capfd.readouterr().err == ""


def test_missing_tensor(folder):
    edit_tensors(folder, **{"model.layers.1.mlp.up_proj.weight": None})
    assert "missing tensors: model.layers.1.mlp.up_proj.weight" in refusal(folder)


def test_unknown_tensor(folder):
    edit_tensors(folder, **{"model.layers.0.self_attn.q_norm.weight": torch.zeros(8)})
    assert "unknown tensors: model.layers.0.self_attn.q_norm.weight" in refusal(folder)


def test_misshapen_tensor(folder):
    edit_tensors(folder, **{"model.norm.weight": torch.zeros(31)})
    assert "model.norm.weight has shape [31]; allowed: [32]" in refusal(folder)


def test_configuration_of_another_size(folder):
    edit_config(folder, num_hidden_layers=5)
    assert "missing tensors: model.layers.4." in refusal(folder)


@pytest.mark.parametrize("architectures", [["Qwen3ForCausalLM"], ["LlamaForSequenceClassification"], None])
def test_other_architectures(folder, architectures):
    edit_config(folder, architectures=architectures)
    message = refusal(folder)
    assert (architectures[0] if architectures else "none") in message and "LlamaForCausalLM" in message


@pytest.mark.parametrize("rope_type", ["longrope", "dynamic"])
def test_rope_that_depends_on_the_neighbours(folder, rope_type):
    edit_config(folder, rope_parameters={"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0})
    assert f"rope type '{rope_type}'" in refusal(folder)


def test_quantised_weights(folder):
    edit_config(folder, quantization_config={"quant_method": "awq"})
    assert "quantization_config (awq)" in refusal(folder)


def test_cut_short_file(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    assert "'model.safetensors' cannot be read" in refusal(folder)


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    assert "has no weights; looked for model.safetensors" in refusal(folder)


def test_no_tokenizer(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(UserError, match="tokenizer cannot be loaded"):
        load_tokenizer(folder)


def test_one_bos_at_most(folder):
    tokenizer = load_tokenizer(folder)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "w5 w6"}], tokenize=False, add_generation_prompt=True)
    assert encode_text(tokenizer, text, templated=True) == [1, 5, 6, 2, 3]
    assert encode_text(tokenizer, "w5", templated=False) == [5]  # this tokenizer adds none


def test_one_bos_at_most_when_the_tokenizer_adds_it(folder):
    from tokenizers import processors

    tokenizer = load_tokenizer(folder)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    assert encode_text(tokenizer, "w5", templated=False) == [1, 5]
    assert encode_text(tokenizer, "<s> w5", templated=False) == [1, 5]
    assert encode_text(tokenizer, "<s> w5", templated=True) == [1, 5]


def test_quiet_puts_back_what_was_set():
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with pytest.raises(ValueError, match="x"), quiet_transformers():
        assert not logging.is_progress_bar_enabled()
        raise ValueError("x")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
