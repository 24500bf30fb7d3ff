"""The training-time test reads what the draft reads when it drafts."""

from __future__ import annotations

import pytest
import torch

from engine.models.eagle3 import Eagle3Head
from jobs.train_draft.head import make_config, new_head
from jobs.train_draft.unroll import Batch, Unroll
from tests.tiny_models import tiny_llama

STEPS, QUERIES = 3, 4
LENGTHS, FIRSTS = (9, 14), (2, 5)


@pytest.fixture
def head(tmp_path) -> Eagle3Head:
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(tiny_llama(tmp_path))
    config = make_config(target, draft_vocab_size=20, intermediate_size=None, feature_layers=(1, 2, 3), max_tokens=64)
    torch.manual_seed(1)
    return new_head(config, target, torch.arange(20) + 5)


@pytest.fixture
def texts(head) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randint(32, (length,)), torch.randn(length, 3 * 32)) for length in LENGTHS]


def make_batch(texts) -> Batch:
    places = QUERIES + STEPS - 1
    lengths = torch.tensor([first + QUERIES for first in FIRSTS])
    tokens = [torch.nn.functional.pad(token, (0, places)) for token, _ in texts]
    return Batch(
        context_BL=torch.arange(int(lengths.max())) < lengths.unsqueeze(-1),
        token_N=torch.cat([token[1 : length + 1] for (token, _), length in zip(texts, lengths, strict=True)]),
        feature_NF=torch.cat([feature[:length] for (_, feature), length in zip(texts, lengths, strict=True)]),
        position_N=torch.cat([torch.arange(length) for length in lengths]),
        first_B=torch.tensor(FIRSTS),
        token_BT=torch.stack([token[first + 1 : first + 1 + places] for token, first in zip(tokens, FIRSTS, strict=True)]),
        hidden_BTH=torch.zeros(2, places, 32),
        log_z_BT=torch.zeros(2, places),
        exists_BT=torch.ones(2, places, dtype=torch.bool),
    )


def draft(head: Eagle3Head, tokens: torch.Tensor, features: torch.Tensor, query: int) -> list[torch.Tensor]:
    """What the output head reads at each step, as a draft does it: one pair after another over a growing cache."""
    keys, values = [], []

    def attend(query_NAD, key_NGD, value_NGD):
        keys.append(key_NGD)
        values.append(value_NGD)
        key, value = (torch.cat(some).repeat_interleave(2, 1).transpose(0, 1) for some in (keys, values))
        weight = (query_NAD.transpose(0, 1) @ key.transpose(1, 2) * head.head_dim**-0.5).softmax(-1)
        return (weight @ value).transpose(0, 1)

    outputs, feature = [], None
    for pair in range(query + STEPS):
        feature = head.fuse(features[pair : pair + 1]) if pair <= query else feature
        feature = head(tokens[pair + 1 : pair + 2], feature, torch.tensor([pair]), attend)
        if pair >= query:
            outputs.append(head.norm(feature)[0])
    return outputs


def test_each_step_is_that_of_a_draft(head, texts):
    with torch.no_grad():
        found = Unroll(head, torch.ones(96))(make_batch(texts), STEPS)
        for text, (tokens, features) in enumerate(texts):
            padded = torch.nn.functional.pad(tokens, (0, STEPS))
            for number in range(QUERIES):
                if FIRSTS[text] + number + 1 >= len(tokens):
                    continue
                expected = draft(head, padded, features, FIRSTS[text] + number)
                torch.testing.assert_close(found[:, text, number], torch.stack(expected), atol=2e-5, rtol=1e-4)


def test_a_scale_is_taken_out_of_the_features(head, texts):
    batch = make_batch(texts)
    with torch.no_grad():
        before = Unroll(head, torch.ones(96))(batch, STEPS)
        scale = torch.rand(96) + 0.5
        head.fc.weight.mul_(scale)
        torch.testing.assert_close(Unroll(head, scale)(batch, STEPS), before, atol=2e-5, rtol=1e-4)
