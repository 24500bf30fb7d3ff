"""What is captured is what transformers computes, each text by itself."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from jobs.train_draft.capture import Capture
from jobs.train_draft.held_out import hash_prompt, is_held_out
from jobs.train_draft.shards import Corpus
from tests.tiny_models import tiny_llama

LAYERS = (1, 2, 3)
ROWS = [
    {"status": "ok", "prompt": "<s> w5 w9 </s> w3", "num_prompt_tokens": 5, "token_ids": [7, 8, 9, 2]},
    {"status": "error", "prompt": "w5", "num_prompt_tokens": None, "token_ids": None},
    {"status": "ok", "prompt": "<s> w11 </s> w3", "num_prompt_tokens": 4, "token_ids": [12, 13, 14, 15, 16, 17]},
    {"status": "ok", "prompt": "<s> w4 </s> w3", "num_prompt_tokens": 4, "token_ids": [5, 6]},  # too short
    {"status": "ok", "prompt": "<s> w4 </s> w3", "num_prompt_tokens": 9, "token_ids": [5, 6, 7, 8]},  # of another prompt
]


@pytest.fixture
def target(tmp_path):
    return tiny_llama(tmp_path / "target")


def capture(target, tmp_path, max_tokens: int) -> tuple[dict, Corpus]:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "part.parquet")
    options = {"target": str(target), "revision": None, "dtype": "float32", "device": "cpu", "feature_layers": LAYERS, "threads": None}
    (tmp_path / "features").mkdir()
    result = Capture(**options, max_tokens=max_tokens).write(tmp_path / "part.parquet", tmp_path / "features" / "part.safetensors")
    return result, Corpus(tmp_path / "features")


@torch.no_grad()
def test_features_and_laws_are_those_of_the_target(target, tmp_path):
    result, corpus = capture(target, tmp_path, max_tokens=64)
    assert result == {"texts": 2, "tokens": 19, "left_out": 3}
    model = AutoModelForCausalLM.from_pretrained(target)
    for text, row in enumerate((ROWS[0], ROWS[2])):
        tokens, start = corpus.token(text), row["num_prompt_tokens"]
        assert tokens[start:].tolist() == row["token_ids"]
        assert corpus.answer_start_D[text] == start
        assert corpus.prompt_hash_D[text] == hash_prompt(row["prompt"])
        out = model(tokens.unsqueeze(0), output_hidden_states=True)
        expected = torch.cat([out.hidden_states[layer][0] for layer in LAYERS], -1)
        torch.testing.assert_close(corpus.feature(text, len(tokens)), expected, atol=1e-4, rtol=1e-4)
        hidden, log_z = corpus.law(text, start, len(tokens))
        law = (hidden @ model.lm_head.weight.T - log_z.unsqueeze(-1)).exp()
        torch.testing.assert_close(law, out.logits[0, start:].softmax(-1), atol=1e-5, rtol=1e-4)


def test_what_is_behind_the_longest_text_is_left_out(target, tmp_path):
    result, corpus = capture(target, tmp_path, max_tokens=8)
    assert result["texts"] == 2
    assert corpus.length_D.tolist() == [8, 8]


def test_a_share_of_the_prompts_is_held_out():
    hashes = [hash_prompt(f"prompt {number}") for number in range(4000)]
    assert 0.08 < sum(is_held_out(value, 0.1) for value in hashes) / 4000 < 0.12
    assert all(is_held_out(value, 0.2) for value in hashes if is_held_out(value, 0.1))
