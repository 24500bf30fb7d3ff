"""Prompts that the model has no room for, and rows that go past what the draft was trained on (FIELD-CASES A1, B27, B28)."""

from __future__ import annotations

import pytest

from engine import Request, SamplingParams
from tests.engine.tiny_engines import VOCAB, Tiny, random_prompts, run
from tests.tiny_models import tiny_eagle3


@pytest.mark.parametrize(
    "fields", [{"prompt": "w3 " * 500}, {"messages": [{"role": "user", "content": "w3 " * 497}]}, {"token_ids": [3] * 500}], ids=list
)
def test_a_prompt_that_is_too_long_is_counted_and_costs_no_pass(tiny, monkeypatch, fields):
    engine = tiny.engine("rheo", max_model_len=60)
    monkeypatch.setattr(tiny.target, "forward", lambda *_: pytest.fail("a pass was made"))
    (result,) = engine.generate([Request(**fields)])
    assert (result.finish_reason, result.error.type) == ("error", "prompt_too_long")
    assert result.num_prompt_tokens == 500


@pytest.mark.parametrize("method", ["rheo", "coupled", "chain"])
def test_past_its_trained_length_a_head_harms_nothing(tiny, tmp_path, method):
    """Prompt and output go past it; a row that does not is beside."""
    draft = tiny_eagle3(tmp_path / "draft", tiny.target.config, max_position_embeddings=32)
    short = Tiny(target_folder=tiny.target_folder, draft_folder=draft)
    engine = short.engine(method, max_batch=3)
    assert engine.draft_trained_length == 32
    prompts = random_prompts([90, 25, 4], seed=11)
    results = run(engine, prompts, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    assert [result.token_ids for result in results] == [tiny.greedy(prompt, 20) for prompt in prompts]
    assert max(token for result in results for token in result.token_ids) < VOCAB
