"""Loading a target: strict about its tensors, quiet on stderr."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import ByT5Tokenizer

from engine.errors import UserError
from engine.models.loading import load_causal_lm, load_tokenizer, quiet_transformers
from tests.tiny_models import pickle_weights, rotary_frequencies, save_sentencepiece, tiny_llama


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


@pytest.mark.parametrize("architectures", [["GemmaForCausalLM"], ["LlamaForSequenceClassification"], None])
def test_other_architectures(folder, architectures):
    edit_config(folder, architectures=architectures)
    message = refusal(folder)
    assert (architectures[0] if architectures else "none") in message and "LlamaForCausalLM" in message


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"hidden_size": 30}, "The hidden size (30) is not a multiple"),
        ({"rms_norm_eps": "small"}, "'rms_norm_eps' expected float, got str"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "Missing required keys"),
        ({"hidden_act": "gelly"}, "KeyError: 'gelly'"),
    ],
)
def test_configurations_that_transformers_refuses(folder, fields, complaint):
    edit_config(folder, **fields)
    assert complaint in refusal(folder)


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


def test_pickled_files_of_an_old_version(folder):
    """Their rotary frequencies are not needed; nothing else may be superfluous."""
    before = load_causal_lm(folder, torch.float32, "cpu").state_dict()
    pickle_weights(folder, num_files=2, **rotary_frequencies(num_layers=4, head_dim=8))
    after = load_causal_lm(folder, torch.float32, "cpu")
    assert after.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.state_dict().items())
    assert after.model.rotary_emb.inv_freq[0] == 1


def test_unknown_tensor_in_a_pickled_file(folder):
    pickle_weights(folder, **{"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)})
    assert "unknown tensors: model.layers.0.self_attn.q_proj.bias" in refusal(folder)


class Evil:
    def __reduce__(self):
        return (Path.touch, (Path("was_run"),))


@pytest.mark.parametrize("content", [b"junk", pickle.dumps({"model.norm.weight": Evil()}, protocol=2)], ids=["junk", "evil"])
def test_broken_and_evil_pickles(folder, content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    assert "'pytorch_model.bin' cannot be read" in refusal(folder)
    assert not Path("was_run").exists()


@pytest.mark.parametrize("content", [[torch.zeros(2)], torch.zeros(3), {1: torch.zeros(2)}, 5], ids=str)
@pytest.mark.parametrize("num_files", [1, 2])
def test_pickles_of_other_things(folder, content, num_files):
    pickle_weights(folder, num_files=num_files)
    file = min(folder.glob("*.bin"))
    torch.save(content, file)
    assert f"'{file.name}' holds other things than named tensors; allowed: a state_dict, nothing around it" in refusal(folder)


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    assert "has no weights; looked for model.safetensors" in refusal(folder)


def test_no_tokenizer(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(UserError, match="tokenizer cannot be loaded"):
        load_tokenizer(folder)


def test_a_tokenizer_without_a_fast_form(folder):
    for path in folder.glob("*token*"):
        path.unlink()
    ByT5Tokenizer().save_pretrained(folder)
    with pytest.raises(UserError, match="ByT5Tokenizer in Python"):
        load_tokenizer(folder)


def test_a_template_in_place_of_the_tokenizers(folder, tmp_path):
    (tmp_path / "template.jinja").write_text("{{ messages[0].content }}!")
    tokenizer = load_tokenizer(folder, tmp_path / "template.jinja")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"


def test_tokenizer_json_is_the_tokenizer(folder):
    """Whatever class tokenizer_config.json names: DeepSeek's byte-level tokenizers say LlamaTokenizerFast."""
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": "LlamaTokenizerFast"}))
    assert load_tokenizer(folder)("w5 w6")["input_ids"] == [5, 6]


def test_sentencepiece_without_tokenizer_json(folder):
    processor = save_sentencepiece(folder, 400)
    tokenizer = load_tokenizer(folder)
    for text in ("A chat between us.", "The answers:\n\n 12  \u00e9\U0001f600"):
        assert tokenizer(text)["input_ids"] == [1, *processor.encode(text)]
        assert tokenizer.decode(tokenizer(text)["input_ids"][1:]) == text
    (folder / "tokenizer.model").write_bytes(b"junk")
    with pytest.raises(UserError, match="tokenizer cannot be loaded"):
        load_tokenizer(folder)


def test_quiet_puts_back_what_was_set():
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with pytest.raises(ValueError, match="x"), quiet_transformers():
        assert not logging.is_progress_bar_enabled()
        raise ValueError("x")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
