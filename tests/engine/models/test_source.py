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
from engine.models.hub import HubModel
from engine.models.presets import PRESETS
from engine.models.source import ResolvedDraft, _find_target, check_draft, check_target, resolve_draft, resolve_target, resolve_topology
from tests.engine.models.tiny_gguf import byte_tokens, write_gguf
from tests.tiny_models import pickle_weights, tiny_eagle3, tiny_llama, tiny_target

ROOT = Path(__file__).parents[3]
NAME = "smollm2-135m-instruct"
PRESET = PRESETS[NAME]
needs_package = pytest.mark.skipif(importlib.util.find_spec(PRESET.gguf_module) is None, reason=f"needs {PRESET.gguf_requirement}")


def target_refusal(target, revision=None) -> str:
    """The message, the same from the check and from the work."""
    return refusal((check_target, resolve_target), str(target), revision)


def draft_refusal(draft, preset=None, method="rheo") -> str:
    return refusal((check_draft, resolve_draft), str(draft), preset, method)


def refusal(functions, *arguments) -> str:
    messages = []
    for function in functions:
        with pytest.raises(UserError) as caught:
            function(*arguments)
        messages.append(str(caught.value))
    assert len(set(messages)) == 1
    return messages[0]


def test_no_torch_before_it_is_needed():
    code = (
        "import sys; from engine.models.source import check_target, check_draft; "
        f"check_draft('auto', check_target('{NAME}'), 'rheo'); "
        "print([name for name in ('torch', 'transformers', 'ray') if name in sys.modules])"
    )
    if importlib.util.find_spec(PRESET.gguf_module) is None:
        code = code.replace(f"check_target('{NAME}')", f"source.PRESETS['{NAME}']").replace("import check", "import source, check")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_a_folder_is_itself(tmp_path, monkeypatch):
    folder = tiny_llama(tmp_path / "target")
    assert check_target(str(folder)) is None
    resolved = resolve_target(str(folder))
    assert (resolved.path, resolved.preset, resolved.revision, resolved.chat_template) == (folder, None, None, None)
    monkeypatch.chdir(tmp_path)
    assert resolve_target("target").name == str(folder), "workers may run in another folder"


def test_a_gguf_file_is_converted(tmp_path, monkeypatch):
    monkeypatch.setenv("RHEO_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    write_gguf(file, tiny_target(tmp_path / "source", vocab=len(byte_tokens()), hidden=64))
    assert check_target(str(file)) is None
    assert not (tmp_path / "cache").exists(), "a check converts nothing"
    resolved = resolve_target(str(file))
    assert (resolved.path.parent, resolved.name) == (tmp_path / "cache" / "models", str(file))
    assert resolve_draft(str(file), None, "topk", resolved.path) == ResolvedDraft("causal_lm", resolved.path, str(file))
    assert "model.revision='v2'" in target_refusal(file, "v2")


def test_unknown_target():
    message = target_refusal("smollm2-135m-instrukt")
    assert "'smollm2-135m-instrukt'; did you mean 'smollm2-135m-instruct'?" in message
    assert "a folder with config.json and weights, a GGUF file, a Hugging Face id (org/name)" in message


@pytest.mark.parametrize("target", ["model.gguf", "", "/no/such/folder", "models/model.gguf", "./org/name", "org/name/file"])
def test_other_targets(target):
    assert f"unknown model.target '{target}'" in target_refusal(target)


def test_a_file_of_another_kind(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"PK")
    assert "is no GGUF file: it begins with b'PK'" in target_refusal(tmp_path / "model.gguf")


def test_folder_without_config(tmp_path):
    assert "has no config.json" in target_refusal(tmp_path)


@pytest.mark.parametrize(("text", "complaint"), [("{", "cannot be read as JSON"), ("[]", "holds a list")])
def test_folder_with_a_broken_config(tmp_path, text, complaint):
    (tmp_path / "config.json").write_text(text)
    assert complaint in target_refusal(tmp_path)


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures GPT2LMHeadModel; allowed: LlamaForCausalLM, Mistral"),
        ({"architectures": ["LlamaForCausalLM", "Qwen2ForCausalLM"]}, "architectures LlamaForCausalLM, Qwen2ForCausalLM"),
        ({"architectures": None, "model_type": "gpt2"}, "architectures none (model_type='gpt2')"),
        ({"model_type": "qwen2"}, "model_type='qwen2'; allowed: llama with architectures LlamaForCausalLM"),
        ({"vocab_size": None}, "vocab_size=None; allowed: an integer"),
        ({"max_position_embeddings": None}, "max_position_embeddings=None; allowed: an integer"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'; allowed: default, linear, llama3, yarn"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config (awq)"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0; allowed: not set"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5; allowed: not set or 1.0"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=['full_attention', 'sliding_attention']"),
        ({**QWEN2, "layer_types": ["chunked_attention"], "use_sliding_window": True, "max_window_layers": 0}, "layer_types=['chunked"),
        ({**QWEN2, "layer_types": ["sliding_attention"], "use_sliding_window": False}, "layer_types=['sliding_attention']"),
        ({"architectures": "LlamaForCausalLM"}, "architectures='LlamaForCausalLM'; allowed: a list with one of LlamaForCausalLM, Mistral"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures=[['LlamaForCausalLM']]; allowed: a list with one of"),
        ({"model_type": ["llama"]}, "model_type=['llama']; allowed: llama"),
        ({"vocab_size": True}, "vocab_size=True; allowed: an integer >= 1"),
        ({"max_position_embeddings": 0}, "max_position_embeddings=0; allowed: an integer >= 1"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear'; allowed: a JSON object"),
        ({"rope_parameters": [1]}, "rope_parameters=[1]; allowed: a JSON object"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope type '['yarn']'; allowed: default"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "allowed: partial_rotary_factor not set or 1.0"),
        ({"quantization_config": "int8"}, "quantization_config ('int8'); allowed: unquantised weights"),
        ({"layer_types": 3}, "layer_types=3; allowed: a list of names"),
        ({"layer_types": [["full_attention"]]}, "layer_types=[['full_attention']]; allowed: a list of names"),
        ({**MISTRAL, "sliding_window": "wide"}, "sliding_window='wide'; allowed: an integer >= 1, or null"),
        ({**MISTRAL, "sliding_window": 0}, "sliding_window=0; allowed: an integer >= 1, or null"),
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": "all"}, "max_window_layers='all'; allowed: an integer >= 0, or null"),
        ({"eos_token_id": 32}, "eos_token_id=32; allowed: token ids from 0 to 31"),
    ],
)
def test_configurations_that_cannot_be_run(tmp_path, fields, complaint):
    sizes = {"hidden_size": 32, "vocab_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **sizes, **fields}))
    assert complaint in target_refusal(tmp_path)


@pytest.mark.parametrize(("name", "complaint"), [("model.safetensors", "has no weights"), ("tokenizer.json", "has no tokenizer")])
def test_folder_that_lacks_a_file(tmp_path, name, complaint):
    folder = tiny_llama(tmp_path / "target")
    (folder / name).unlink()
    assert complaint in target_refusal(folder)


@pytest.mark.parametrize(
    ("index", "complaint"),
    [
        (
            '{"weight_map": {"a": "model-1.safetensors"}}',
            "lacks weight files that 'model.safetensors.index.json' lists: model-1.safetensors",
        ),
        ("[]", "is no index of weights"),
    ],
)
def test_folder_with_a_part_of_its_weights(tmp_path, index, complaint):
    folder = tiny_llama(tmp_path / "target")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    assert complaint in target_refusal(folder)


def test_revision_of_a_folder(tmp_path):
    assert "model.revision='v2'" in target_refusal(tiny_llama(tmp_path / "target"), "v2")


def test_a_revision_of_a_preset_is_the_hubs(tmp_path):
    assert isinstance(_find_target(NAME, "v2")[1], HubModel)
    assert _find_target(NAME, "v2")[1].revision == "v2"


def test_drafts(tmp_path):
    folder = tiny_eagle3(tmp_path / "draft", LlamaConfig(vocab_size=32, hidden_size=32))
    assert resolve_draft(str(folder), None, "rheo") == ResolvedDraft("eagle3", folder, str(folder))
    assert resolve_draft("auto", PRESET, "rheo") == ResolvedDraft("eagle3", PRESET.draft, "auto")
    assert resolve_draft("ngram", None, "rheo") == ResolvedDraft("ngram", None, "ngram")
    assert resolve_draft("auto", None, "off") is None
    assert resolve_draft("no such thing", None, "off") is None
    check_draft("ngram", None, "rheo")
    check_draft("auto", None, "off")


def test_tensors_tell_the_kind_of_a_draft(tmp_path):
    """Heads call themselves LlamaForCausalLM, too."""
    config = LlamaConfig.from_pretrained(tiny_llama(tmp_path / "target"))
    head = tiny_eagle3(tmp_path / "head", config, architectures=["LlamaForCausalLM"])
    pickled = tiny_eagle3(tmp_path / "pickled", config)
    pickle_weights(pickled)
    kinds = {name: resolve_draft(str(tmp_path / name), None, "rheo").kind for name in ("target", "head", "pickled")}
    assert kinds == {"target": "causal_lm", "head": "eagle3", "pickled": "eagle3"}
    (head / "model.safetensors").write_bytes(b"junk")
    assert "'model.safetensors' cannot be read: SafetensorError" in draft_refusal(head)
    (pickled / "pytorch_model.bin").write_bytes(b"junk")
    assert "'pytorch_model.bin' cannot be read" in draft_refusal(pickled)


NO_STATE_DICTS = {
    "a list": [torch.zeros(2)],
    "a tensor": torch.zeros(3),
    "nested": {"model": {"a": torch.zeros(2)}},
    "numbers as names": {1: torch.zeros(2)},
    "other values": {"fc.weight": 1},
}


@pytest.mark.parametrize("content", NO_STATE_DICTS.values(), ids=NO_STATE_DICTS)
def test_weights_of_a_draft_that_are_no_state_dict(tmp_path, content):
    draft = tiny_eagle3(tmp_path / "draft", LlamaConfig(vocab_size=32, hidden_size=32))
    (draft / "model.safetensors").unlink()
    torch.save(content, draft / "pytorch_model.bin")
    assert "'pytorch_model.bin' holds other things than named tensors; allowed: a state_dict" in draft_refusal(draft)


def test_a_length_beyond_the_targets_limit(tmp_path, monkeypatch):
    """Of a folder, and of a file that is not converted for it."""
    monkeypatch.setenv("RHEO_CACHE", str(tmp_path / "cache"))
    folder = tiny_target(tmp_path / "source", vocab=len(byte_tokens()), hidden=64)
    write_gguf(tmp_path / "model.gguf", folder)
    for target in (folder, tmp_path / "model.gguf"):
        message = refusal((check_target, resolve_target), str(target), None, 513)
        assert message == "model.max_model_len=513; allowed: up to 512, the model's max_position_embeddings"
        assert check_target(str(target), None, 512) is None
    assert not (tmp_path / "cache").exists()
    resolve_target(str(tmp_path / "model.gguf"))
    with pytest.raises(UserError, match=r"model\.max_model_len=513"):
        check_target(str(tmp_path / "model.gguf"), None, 513)


def test_draft_of_another_target_is_found_without_loading(tmp_path):
    target = str(tiny_llama(tmp_path / "target"))
    draft = str(tiny_eagle3(tmp_path / "draft", LlamaConfig(vocab_size=40, hidden_size=32)))
    with pytest.raises(UserError, match="vocab_size=40, the target has vocab_size=32"):
        check_draft(draft, None, "rheo", target)
    check_draft(str(tiny_eagle3(tmp_path / "fits", LlamaConfig(vocab_size=32, hidden_size=32))), None, "rheo", target)


@pytest.mark.parametrize(
    ("draft", "complaint"),
    [
        ({"vocab": 40}, "its tokenizer has 40 tokens, the target's has 32, and they are not the same (token 'w32' has id 32 in the draft"),
        (
            {"vocab": 24},
            "its tokenizer has 24 tokens, the target's has 32, and they are not the same (token 'w24' has id None in the draft",
        ),
        ({"vocab": 32, "vocab_size": 30}, "vocab_size=30; allowed: at least 32"),
        ({"vocab": 32, "vocab_size": 64}, None),
    ],
)
def test_draft_with_another_vocabulary(tmp_path, draft, complaint):
    """A draft's embeddings may be padded; its tokens must be the target's."""
    target, draft = tiny_llama(tmp_path / "target"), str(tiny_target(tmp_path / "draft", "qwen2", **draft))
    for check in (lambda: check_draft(draft, None, "topk", str(target)), lambda: resolve_draft(draft, None, "topk", target)):
        if complaint is None:
            check()
        else:
            with pytest.raises(UserError) as caught:
                check()
            assert complaint in str(caught.value)


def test_auto_draft_without_a_preset():
    message = draft_refusal("auto")
    assert "model.draft='auto'" in message and NAME in message and "speculation.method=off" in message and "ngram" in message


def test_unknown_drafts(tmp_path):
    assert "did you mean 'auto'?" in draft_refusal("autp")
    for draft in ("", f"{tmp_path}@v2", f"{NAME}@v2"):
        assert f"unknown model.draft '{draft}'" in draft_refusal(draft)
    assert "has no config.json" in draft_refusal(tmp_path)
    folder = tiny_eagle3(tmp_path / "draft", LlamaConfig(vocab_size=32, hidden_size=32))
    (folder / "model.safetensors").unlink()
    assert "has no weights" in draft_refusal(folder)


def test_topologies(tmp_path):
    file = tmp_path / "tree.json"
    file.write_text("{}")
    assert resolve_topology(str(file), None) == file
    assert resolve_topology("auto", PRESET) == PRESET.topology
    for topology, preset, complaint in (
        ("auto", None, f"no tree for another model.target; give a topology file (presets with one: {NAME})"),
        ("auto", PRESETS["vicuna-13b-v1.3"], "no tree for model.target='vicuna-13b-v1.3'"),
        (str(tmp_path / "tre.json"), PRESET, "tre.json' is no file; allowed: auto"),
        (str(tmp_path), PRESET, "is no file"),
    ):
        with pytest.raises(UserError) as caught:
            resolve_topology(topology, preset)
        assert complaint in str(caught.value)
