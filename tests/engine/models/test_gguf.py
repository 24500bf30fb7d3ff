"""Converting a GGUF file: the values survive, the work is done once, and what is half done is never used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file

from engine.errors import UserError
from engine.models import gguf as conversion
from engine.models.loading import load_causal_lm, load_tokenizer
from tests.engine.models.tiny_gguf import CHAT_TEMPLATE, byte_tokens, write_gguf
from tests.tiny_models import LLAMA3_ROPE, save_sentencepiece, tiny_target

ROOT = Path(__file__).parents[3]
CONVERT = "import sys; from pathlib import Path; from engine.models.gguf import convert_gguf; print(convert_gguf(Path(sys.argv[1])))"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(GGUF file, its weights, cache, outputs of two processes that converted it at the same time)."""
    folder = tmp_path_factory.mktemp("gguf")
    file = folder / "tiny.gguf"
    weights = write_gguf(file, tiny_gguf_source(folder / "model", rope_parameters={"rope_theta": 100000.0, "rope_type": "default"}))
    cache = folder / "cache"
    env = {**os.environ, "RHEO_CACHE": str(cache), "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen([sys.executable, "-c", CONVERT, str(file)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=240) for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    return file, weights, cache, outputs


def tiny_gguf_source(folder: Path, architecture: str = "llama", **config) -> Path:
    """A model whose tokens are those of `byte_tokens`, and whose matrices can be quantised."""
    return tiny_target(folder, architecture, vocab=len(byte_tokens()), hidden=64, **config)


def test_two_processes_convert_once(tiny):
    _, _, cache, outputs = tiny
    folders = {out.strip() for out, _ in outputs}
    assert len(folders) == 1
    folder = Path(folders.pop())
    assert sorted(path.name for path in (cache / "models").iterdir()) == [folder.name, folder.name + ".lock"]
    said = [err for _, err in outputs if err]
    assert len(said) == 1, "only the one that converts says so"
    assert said[0] == f"converting tiny.gguf once into {folder} (about a minute per GB)\n"
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in folder.iterdir())


def test_values_survive_exactly(tiny):
    _, weights, _, outputs = tiny
    folder = Path(outputs[0][0].strip())
    written = load_file(folder / "model.safetensors")
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], weights[name]) for name in weights)
    model = load_causal_lm(folder, torch.float32, "cpu")
    assert torch.equal(model.lm_head.weight, weights["model.embed_tokens.weight"])


def test_configuration_and_tokenizer_are_the_files(tiny):
    _, _, _, outputs = tiny
    folder = Path(outputs[0][0].strip())
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rope_parameters"] == {"rope_theta": 100000.0, "rope_type": "default"}
    assert (config["tie_word_embeddings"], config["max_position_embeddings"], config["vocab_size"]) == (True, 512, 259)
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 1)
    assert "quantization_config" not in config
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.chat_template) == (0, 1, CHAT_TEMPLATE)
    assert tokenizer.convert_ids_to_tokens(tokenizer("x=  10")["input_ids"]) == ["x", "=", "\u0120\u0120", "1", "0"]  # SmolLM's digits


SOURCES = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3_ROPE, "hidden_size": 128, "max_position_embeddings": 16384}),
    "mistral": ("mistral", {"head_dim": 24}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", {"head_dim": 24}),
}


@pytest.mark.parametrize("name", SOURCES)
def test_the_model_is_the_one_that_was_written(name, tmp_path, monkeypatch):
    """Logits are those of the source with its dequantised weights, to the last bit."""
    monkeypatch.setenv("RHEO_CACHE", str(tmp_path / "cache"))
    architecture, config = SOURCES[name]
    source = tiny_gguf_source(tmp_path / "source", architecture, **config)
    weights = write_gguf(tmp_path / "model.gguf", source, pre="qwen2")
    reference = load_causal_lm(source, torch.float32, "cpu")
    reference.load_state_dict(weights, strict=not reference.config.tie_word_embeddings)
    conversion.check_gguf(tmp_path / "model.gguf")
    model = load_causal_lm(conversion.convert_gguf(tmp_path / "model.gguf"), torch.float32, "cpu")
    token_1T = torch.randint(259, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.equal(model(token_1T).logits, reference(token_1T).logits)


@pytest.mark.parametrize(
    "pre, ids_begin, pieces",
    [
        ("gpt-2", [], ["a", "\u0120", "\u0120", "1", "2", "3", "4", "e", "\u00cc", "\u0123"]),
        ("qwen2", [], ["a", "\u0120", "\u0120", "1", "2", "3", "4", "\u00c3", "\u00a9"]),  # e and its accent become one letter
        ("llama-bpe", [0], ["a", "\u0120", "\u0120", "1", "2", "3", "4", "e", "\u00cc", "\u0123"]),
    ],
)
def test_byte_level_tokenizers(pre, ids_begin, pieces, tmp_path, monkeypatch):
    monkeypatch.setenv("RHEO_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "model.gguf", tiny_gguf_source(tmp_path / "source"), pre=pre)
    tokenizer = load_tokenizer(conversion.convert_gguf(tmp_path / "model.gguf"))
    text = "a  1234e\u0301"
    ids = tokenizer(text)["input_ids"]
    assert ids[: len(ids_begin)] == ids_begin
    assert tokenizer.convert_ids_to_tokens(ids[len(ids_begin) :]) == pieces
    split = [piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("I'm  1234")]
    digits = {"gpt-2": ["\u01201234"], "qwen2": ["\u0120", "1", "2", "3", "4"], "llama-bpe": ["\u0120", "123", "4"]}[pre]
    assert split == ["I", "'m", "\u0120", *digits]
    assert tokenizer.backend_tokenizer.model.ignore_merges == (pre == "llama-bpe")
    assert len(tokenizer) == len(byte_tokens()) and tokenizer.unk_token is None, "no token that the model does not have"


def test_sentencepiece_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setenv("RHEO_CACHE", str(tmp_path / "cache"))
    source = tiny_target(tmp_path / "source", vocab=400, hidden=64)
    processor = save_sentencepiece(source, 400)
    write_gguf(tmp_path / "model.gguf", source, sentencepiece=processor)
    tokenizer = load_tokenizer(conversion.convert_gguf(tmp_path / "model.gguf"))
    for text in ("A chat between us.", "The answers:\n\n 12  \u00e9\U0001f600"):
        assert tokenizer(text)["input_ids"] == [1, *processor.encode(text)]
        assert tokenizer.decode(tokenizer(text)["input_ids"][1:]) == text


@pytest.mark.parametrize(
    "fields, complaint",
    [
        ({"attention__sliding_window": 64}, "llama.attention.sliding_window=64; allowed: not set"),
        ({"rope__scaling__type": "yarn"}, "llama.rope.scaling.type='yarn'; allowed: none"),
        ({"expert_count": 8}, "llama.expert_count=8; allowed: 0"),
        ({"logit_scale": 0.5}, "llama.logit_scale=0.5; allowed: not set"),
        ({"rope__dimension_count": 8}, "llama.rope.dimension_count=8; allowed: 16"),
    ],
)
def test_what_would_change_the_model_is_refused(fields, complaint, tmp_path, monkeypatch):
    monkeypatch.setenv("RHEO_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "model.gguf", tiny_gguf_source(tmp_path / "source"), **fields)
    for function in (conversion.check_gguf, conversion.convert_gguf):
        with pytest.raises(UserError) as caught:
            function(tmp_path / "model.gguf")
        assert complaint in str(caught.value)


def test_unknown_splitting_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("RHEO_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "model.gguf", tiny_gguf_source(tmp_path / "source"), pre="tekken")
    for function in (conversion.check_gguf, conversion.convert_gguf):
        with pytest.raises(UserError, match=r"tokenizer.ggml.pre='tekken'; allowed: gpt-2, smollm, llama-bpe, qwen2"):
            function(tmp_path / "model.gguf")


def test_other_rotary_factors_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("RHEO_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "model.gguf", tiny_gguf_source(tmp_path / "source", rope_parameters={**LLAMA3_ROPE, "low_freq_factor": 2.0}))
    with pytest.raises(UserError, match=r"rope_freqs.weight is not the scaling of Llama 3"):
        conversion.check_gguf(tmp_path / "model.gguf")


@pytest.mark.parametrize("architecture", ["gemma2", "llama4"])
def test_other_architectures(architecture, tmp_path, monkeypatch):
    monkeypatch.setenv("RHEO_CACHE", str(tmp_path / "cache"))
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UserError, match=f"general.architecture='{architecture}'; allowed: llama, qwen2, qwen3"):
        conversion.check_gguf(tmp_path / "model.gguf")


def test_a_file_cut_short(tmp_path, monkeypatch):
    monkeypatch.setenv("RHEO_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "whole.gguf", tiny_gguf_source(tmp_path / "source"))
    whole = (tmp_path / "whole.gguf").read_bytes()
    for size in (10, 2000, len(whole) - 100):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"cut.gguf' cannot be read as GGUF"):
            conversion.check_gguf(tmp_path / "cut.gguf")


@pytest.fixture
def counted(tmp_path, monkeypatch):
    """(GGUF file, list of calls) with a writer that only notes its calls; the first one dies half way."""
    monkeypatch.setenv("RHEO_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF-first")
    calls = []

    def write_model(gguf_file, folder):
        calls.append(folder)
        (folder / "config.json").write_text("{}")
        if len(calls) == 1:
            raise KeyboardInterrupt
        (folder / "model.safetensors").write_text("weights")

    monkeypatch.setattr(conversion, "_write_model", write_model)
    return file, calls


def test_a_half_written_folder_is_never_used(counted):
    file, calls = counted
    with pytest.raises(KeyboardInterrupt):
        conversion.convert_gguf(file)
    assert calls[0].exists() and not conversion.converted_folder(file).exists()
    folder = conversion.convert_gguf(file)
    assert (folder / "model.safetensors").read_text() == "weights"
    assert not calls[0].exists(), "what the dead run left is removed"
    assert conversion.convert_gguf(file) == folder and len(calls) == 2


def test_another_content_or_converter_is_another_folder(counted, monkeypatch):
    file, _ = counted
    first = conversion.converted_folder(file)
    file.write_bytes(b"GGUF-second")
    second = conversion.converted_folder(file)
    monkeypatch.setattr(conversion, "CONVERTER_VERSION", 99)
    assert len({first, second, conversion.converted_folder(file)}) == 3


def test_no_gguf_file(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(UserError, match=r"model\.gguf' is no GGUF file: it begins with b'PK"):
        conversion.check_gguf(tmp_path / "model.gguf")
    with pytest.raises(UserError, match=r"absent\.gguf' cannot be read: No such file"):
        conversion.check_gguf(tmp_path / "absent.gguf")


def test_missing_packages_are_named(counted, monkeypatch):
    file, _ = counted
    monkeypatch.setattr(conversion.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"package gguf: pip install 'rheo\[gguf\]'"):
        conversion.check_gguf(file)
    conversion.converted_folder(file).mkdir(parents=True)
    (conversion.converted_folder(file) / "config.json").write_text('{"hidden_size": 64}', encoding="utf-8")
    assert conversion.check_gguf(file) == {"hidden_size": 64}  # the package is not needed any more


def test_cache_that_cannot_be_written(counted, tmp_path):
    file, _ = counted
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(UserError, match="RHEO_CACHE"):
        conversion.convert_gguf(file)
