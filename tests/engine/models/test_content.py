"""What a model is by its content: every byte that the engine reads, and nothing else."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from engine.errors import UserError
from engine.models import content
from engine.models.checkpoint import load_eagle3
from engine.models.content import describe_draft, describe_target, hash_file
from engine.models.loading import load_causal_lm, load_tokenizer
from engine.models.presets import PRESETS
from tests.engine.models.tiny_gguf import byte_tokens, write_gguf
from tests.engine.models.tiny_hub import TinyHub
from tests.engine.real_pair import PRESET, needs_real_pair
from tests.tiny_models import pickle_weights, save_sentencepiece, tiny_eagle3, tiny_llama, tiny_target

_OPENED, _IS_FOLDER = 0x20, 0x40000000  # of Linux' inotify
_EVENT = struct.Struct("iIII")


@contextmanager
def watch(*folders: Path) -> Iterator[set[Path]]:
    """The files that are opened in `folders`, by whatever means; complete once the block is left."""
    libc = ctypes.CDLL(None)
    events = libc.inotify_init1(os.O_NONBLOCK)
    watched = {libc.inotify_add_watch(events, os.fsencode(folder), _OPENED): folder for folder in folders}
    opened: set[Path] = set()
    yield opened
    data = os.read(events, 1 << 20)
    os.close(events)
    while data:
        number, mask, _, length = _EVENT.unpack_from(data)
        if not mask & _IS_FOLDER:
            opened.add(watched[number] / data[_EVENT.size : _EVENT.size + length].rstrip(b"\0").decode())
        data = data[_EVENT.size + length :]


def matters(path: Path, describe) -> bool:
    """Whether one byte more in a file makes it another model."""
    before, data = describe(), path.read_bytes()
    path.write_bytes(data + b"\n")
    try:
        return describe() != before
    finally:
        path.write_bytes(data)


def word_model(folder: Path) -> Path:
    """With all that transformers can find beside a tokenizer.json."""
    tiny_llama(folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    for name in ("special_tokens_map.json", "added_tokens.json"):
        (folder / name).write_text("{}")
    return folder


def sentencepiece_model(folder: Path) -> Path:
    """And weights in several pickles."""
    tiny_target(folder, vocab=400)
    save_sentencepiece(folder, 400)
    pickle_weights(folder, num_files=2)
    return folder


@pytest.mark.parametrize("make", [word_model, sentencepiece_model])
def test_all_that_the_engine_opens_matters_and_nothing_else(tmp_path, make):
    folder = make(tmp_path / "target")
    others = [folder / name for name in ("README.md", "trainer_state.json", "consolidated.safetensors", "training_args.bin")]
    for path in others:
        path.write_bytes(b"{}")
    with watch(*(Path(place) for place, _, _ in os.walk(folder))) as opened:
        load_causal_lm(folder, torch.float32, "cpu")
        load_tokenizer(folder)
    assert {"config.json", "generation_config.json", "tokenizer_config.json"} < {path.name for path in opened}
    assert opened.isdisjoint(others)
    for path in opened:
        assert matters(path, lambda: describe_target(str(folder))), path
    for path in others:
        assert not matters(path, lambda: describe_target(str(folder))), path


def test_all_of_a_draft_head_matters(tmp_path):
    target = load_causal_lm(tiny_llama(tmp_path / "target"), torch.float32, "cpu")
    folder = tiny_eagle3(tmp_path / "draft", target.config)
    (folder / "README.md").write_text("")
    with watch(folder) as opened:
        embedding = target.get_input_embeddings().weight
        load_eagle3(folder, target_config=target.config, embedding=embedding, dtype=torch.float32, device="cpu")
    assert {path.name for path in opened} == {"config.json", "model.safetensors"}
    for path in opened:
        assert matters(path, lambda: describe_draft(str(folder), "any")), path
    assert not matters(folder / "README.md", lambda: describe_draft(str(folder), "any"))


def test_a_folder_is_what_is_in_it(tmp_path):
    """Wherever it lies; with every name, and with files that come later."""
    folder = tiny_llama(tmp_path / "target")
    before = describe_target(str(folder))
    assert before.startswith("sha256 ") and len(before) == len("sha256 ") + 64
    assert describe_draft(str(folder), "any") == before
    shutil.copytree(folder, tmp_path / "elsewhere")
    assert describe_target(str(tmp_path / "elsewhere")) == before
    (folder / "vocab.json").write_text("{}")
    later = describe_target(str(folder))
    assert later != before
    (folder / "vocab.json").rename(folder / "vocab.txt")
    assert describe_target(str(folder)) not in (before, later), "the same bytes under another name"
    (folder / "vocab.txt").unlink()
    assert describe_target(str(folder)) == before


def test_weights_that_nobody_reads_do_not_matter(tmp_path):
    """Of two formats the engine takes safetensors."""
    folder = tiny_llama(tmp_path / "target")
    before = describe_target(str(folder))
    (folder / "pytorch_model.bin").write_bytes(b"the same weights in another format")
    assert describe_target(str(folder)) == before


def test_a_gguf_file_is_its_bytes_and_its_conversion(tmp_path, monkeypatch):
    monkeypatch.setenv("RHEO_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    write_gguf(file, tiny_target(tmp_path / "source", vocab=len(byte_tokens()), hidden=64))
    text = describe_target(str(file))
    assert text == f"sha256 {sha256(file.read_bytes()).hexdigest()}, conversion {content.CONVERTER_VERSION}"
    assert describe_draft(str(file), "any") == text
    assert not (tmp_path / "cache").exists(), "nothing is converted for it"
    monkeypatch.setattr(content, "CONVERTER_VERSION", content.CONVERTER_VERSION + 1)
    assert describe_target(str(file)) != text


def test_ngram_is_its_name():
    assert describe_draft("ngram", "any") == "ngram"


@needs_real_pair
def test_the_embedded_preset_is_its_name_and_its_files():
    text = describe_target(PRESET.name)
    assert text.startswith(f"{PRESET.name}, sha256 ") and text.endswith(f", conversion {content.CONVERTER_VERSION}")
    assert describe_draft(PRESET.name, PRESET.name) == text
    assert describe_draft("auto", PRESET.name) == describe_draft(str(PRESET.draft), "any")


def test_a_repository_is_its_commit(tmp_path):
    """Which nobody is asked for again once it is in the cache. The template that a preset brings counts."""
    name = "vicuna-13b-v1.3"
    tiny_llama(tmp_path / "hub" / "org" / "target")
    shutil.copytree(tmp_path / "hub" / "org" / "target", tmp_path / "hub" / PRESETS[name].hub_id)
    config = LlamaConfig.from_pretrained(tmp_path / "hub" / "org" / "target")
    tiny_eagle3(tmp_path / "hub" / PRESETS[name].draft, config)
    hub = TinyHub(tmp_path / "hub")
    try:
        target, vicuna, head = (hub.commit(repository) for repository in ("org/target", PRESETS[name].hub_id, PRESETS[name].draft))
        code = (
            "import sys; from engine.models.content import *; print("
            f"describe_target('org/target', {target!r}), describe_target({name!r}, {vicuna!r}), describe_draft('org/target@{target}', ''), "
            f"describe_draft('{PRESETS[name].draft}@{head}', {name!r}), 'torch' in sys.modules, sep='\\n')"
        )
        first = hub.run(code, tmp_path / "home").splitlines()
        template = sha256(PRESETS[name].chat_template.read_bytes()).hexdigest()
        commit = f"commit {target}"
        assert first == [commit, f"{name}, commit {vicuna}, chat template sha256 {template}", commit, f"commit {head}", "False"]
        hub.requests.clear()
        assert hub.run(code, tmp_path / "home").splitlines() == first
        assert not [request for request in hub.requests if "agent-harnesses" not in request]
    finally:
        hub.close()


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UserError, match=r"/no\.json' cannot be read: No such file"):
        hash_file(tmp_path / "no.json")
