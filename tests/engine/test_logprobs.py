"""Log-probabilities are the raw model's at T = 1, whatever the row's own law is."""

from __future__ import annotations

import pytest
import torch

from engine import SamplingParams
from tests.engine.tiny_engines import Tiny, run

ROWS = [
    SamplingParams(max_tokens=12, logprobs=True),
    SamplingParams(max_tokens=12, logprobs=True, temperature=0.0),
    SamplingParams(max_tokens=12, logprobs=True, temperature=0.4, top_p=0.8, top_k=5),
    SamplingParams(max_tokens=12, logprobs=True, repetition_penalty=1.7, logit_bias={7: 3.0}, min_p=0.05),
    SamplingParams(max_tokens=12, logprobs=False),
    SamplingParams(max_tokens=12, logprobs=True, temperature=1.5, min_tokens=9, stop_token_ids=[4, 5, 6, 7], eta=0.02),
    SamplingParams(max_tokens=1, logprobs=True),
]


def raw_logprobs(tiny: Tiny, prompt: list[int], output: list[int]) -> torch.Tensor:
    logits_TV = tiny.logits(prompt + output)[len(prompt) - 1 : -1]
    return logits_TV.double().log_softmax(-1).gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize(
    "method, options",
    [("off", {}), ("rheo", {"tree_size": 40, "top_k": 12}), ("coupled", {"tree_size": 40, "top_k": 12}), ("chain", {})],
    ids=str,
)
def test_logprobs_are_transformers_own(tiny, ragged_prompts, method, options):
    results = run(tiny.engine(method, max_batch=4, **options), ragged_prompts, ROWS)
    for prompt, params, result in zip(ragged_prompts, ROWS, results, strict=True):
        if not params.logprobs:
            assert result.logprobs is None
            continue
        assert len(result.logprobs) == len(result.token_ids)
        expected = raw_logprobs(tiny, prompt, result.token_ids)
        torch.testing.assert_close(torch.tensor(result.logprobs, dtype=torch.float64), expected, rtol=1e-4, atol=2e-4)
    if options:
        assert sum(cycle.accepted for result in results for cycle in result.cycles) > 5


def test_logprobs_end_where_the_tokens_do(make_clock):
    """EOS and a stop string in the middle of an accepted path: what comes behind is cut from both."""
    clock = make_clock([3, 4, 5, 6, 2, 8, 9, 10])
    for params in (
        SamplingParams(temperature=0.0, max_tokens=20, logprobs=True),
        SamplingParams(temperature=0.0, max_tokens=20, logprobs=True, stop=["b"]),
        SamplingParams(temperature=0.0, max_tokens=4, logprobs=True),
    ):
        (result,) = run(clock.engine("rheo", tree_size=10, depth=5), [[0]], params)
        assert result.cycles[0].accepted > 0
        assert len(result.logprobs) == len(result.token_ids)
        torch.testing.assert_close(torch.tensor(result.logprobs).double(), raw_logprobs(clock, [0], result.token_ids), rtol=1e-3, atol=1e-6)
