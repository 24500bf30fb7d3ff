"""Converting a GGUF file: the values survive, the work is done once, and what is half done is never used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.errors import UserError
from engine.models import gguf as conversion
from engine.models.loading import load_causal_lm, load_tokenizer
from tests.engine.models.tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf

ROOT = Path(__file__).parents[3]
CONVERT = "import sys; from pathlib import Path; from engine.models.gguf import convert_gguf; print(convert_gguf(Path(sys.argv[1])))"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(GGUF file, its weights, cache, outputs of two processes that converted it at the same time)."""
    folder = tmp_path_factory.mktemp("gguf")
    file = folder / "tiny.gguf"
    weights = write_tiny_gguf(file)
    cache = folder / "cache"
    env = {**os.environ, "RHEO_CACHE": str(cache), "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen([sys.executable, "-c", CONVERT, str(file)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=240) for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    return file, weights, cache, outputs


def test_two_processes_convert_once(tiny):
    _, _, cache, outputs = tiny
    folders = {out.strip() for out, _ in outputs}
    assert len(folders) == 1
    folder = Path(folders.pop())
    assert sorted(path.name for path in (cache / "models").iterdir()) == [folder.name, folder.name + ".lock"]
    said = [err for _, err in outputs if err]
    assert len(said) == 1, "only the one that converts says so"
    assert said[0] == f"converting tiny.gguf once into {folder} (about half a minute)\n"
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
    assert (config["tie_word_embeddings"], config["max_position_embeddings"], config["vocab_size"]) == (True, 128, 259)
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 1)
    assert "quantization_config" not in config
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.chat_template) == (0, 1, CHAT_TEMPLATE)
    assert tokenizer.convert_ids_to_tokens(tokenizer("x=  10")["input_ids"]) == ["x", "=", "\u0120\u0120", "1", "0"]  # SmolLM's digits


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


def test_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("RHEO_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert conversion.cache_folder() == Path("/a")
    monkeypatch.delenv("RHEO_CACHE")
    assert conversion.cache_folder() == Path("/b/rheo")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert conversion.cache_folder() == Path.home() / ".cache" / "rheo"


def test_no_gguf_file(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(UserError, match=r"model\.gguf' is no GGUF file: it begins with b'PK"):
        conversion.check_gguf(tmp_path / "model.gguf")
    with pytest.raises(UserError, match=r"absent\.gguf' cannot be read: No such file"):
        conversion.check_gguf(tmp_path / "absent.gguf")


def test_missing_packages_are_named(counted, monkeypatch):
    file, _ = counted
    monkeypatch.setattr(conversion.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"packages gguf, accelerate: pip install 'rheo\[gguf\]'"):
        conversion.check_gguf(file)
    conversion.converted_folder(file).mkdir(parents=True)
    conversion.check_gguf(file)  # not needed any more


def test_cache_that_cannot_be_written(counted, tmp_path):
    file, _ = counted
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(UserError, match="RHEO_CACHE"):
        conversion.convert_gguf(file)
