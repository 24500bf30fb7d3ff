"""A document of 6,000 tokens, three times what a pass reads of prompts: the text is transformers' own (FIELD-CASES B27)."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from engine import Request, SamplingParams, Speculation
from engine.models.source import resolve_target
from tests.engine.real_pair import PRESET, load_real_pair, needs_real_pair

pytestmark = needs_real_pair

NUM_TOKENS = 24
REPORTS = Path(__file__).parents[2] / "jobs" / "nightly_summary.jsonl"


def long_document() -> str:
    """The reports of the nightly job, again and again, under the days of a season."""
    reports = [json.loads(line)["document"] for line in REPORTS.read_text(encoding="utf-8").splitlines()]
    days = [f"Day {day}. {reports[day % len(reports)]}" for day in range(1, 45)]
    return "Summarise these reports:\n\n" + "\n\n".join(days)


def test_greedy_text_is_transformers():
    engine = load_real_pair(Speculation(method="rheo"))
    assert engine.decoder.max_prefill_tokens < 6000 / 2
    messages = [{"role": "user", "content": long_document()}]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    (result,) = engine.generate([Request(messages=messages, params=params)])
    assert result.num_prompt_tokens >= 6000 and len(result.token_ids) == NUM_TOKENS

    model = AutoModelForCausalLM.from_pretrained(resolve_target(PRESET.name).path, dtype=torch.float32).eval()
    prompt = torch.tensor([engine.tokenizer(result.prompt, add_special_tokens=False)["input_ids"]])
    with torch.inference_mode():
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NUM_TOKENS)
    assert result.token_ids == output[0, prompt.shape[1] :].tolist()
