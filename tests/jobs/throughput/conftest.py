from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from jobs.throughput.config import BenchConfig, load_bench_config
from tests.tiny_models import tiny_eagle3, tiny_llama


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder with a target, a draft for it, and prompts."""
    folder = tmp_path_factory.mktemp("bench")
    target = tiny_llama(folder / "target", vocab=64, layers=7)
    tiny_eagle3(folder / "draft", LlamaConfig.from_pretrained(target))
    prompts = [{"prompt": " ".join(f"w{3 + (7 * row + 5 * word) % 61}" for word in range(2 + row))} for row in range(6)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return folder


@pytest.fixture
def load(models, tmp_path) -> Callable[..., BenchConfig]:
    """The options of a small bench, with `key=value` over them; its output is in `tmp_path`."""

    def load(*overrides: str, **sections: Any) -> BenchConfig:
        options = {
            "model": {"target": str(models / "target"), "draft": str(models / "draft"), "dtype": "float32"},
            "prompts": {"path": str(models / "prompts.jsonl")},
            "grid": {"batch": [1, 2], "method": ["off", "rheo"], "tree_size": [6], "depth": [2], "output_tokens": [12]},
            "measure": {"repeats": 2, "rows": 2},
            "output": {"path": str(tmp_path / "out")},
            **sections,
        }
        (tmp_path / "bench.yaml").write_text(json.dumps(options))
        return load_bench_config(str(tmp_path / "bench.yaml"), overrides)

    return load
