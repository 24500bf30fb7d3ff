"""The engine on a GPU. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch

from engine import Engine, Request, SamplingParams, Speculation

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")]


@pytest.mark.parametrize("method", ["rheo", "coupled", "topk", "chain", "off"])
def test_a_gpu_writes_the_cpus_text(tiny, ragged_prompts, method):
    requests = [Request(token_ids=prompt, params=SamplingParams(max_tokens=24, ignore_eos=True)) for prompt in ragged_prompts]

    def tokens(device: str) -> list[list[int]]:
        speculation = Speculation(method=method, tree_size=10, depth=3, top_k=4)
        engine = Engine.load(tiny.target_folder, tiny.draft_folder, dtype="float32", device=device, speculation=speculation, max_batch=3)
        return [result.token_ids for result in engine.generate(requests)]

    assert tokens("cuda") == tokens("cpu")
