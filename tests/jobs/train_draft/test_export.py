"""The draft that is written is the head that was trained."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.models.checkpoint import load_eagle3, read_tensors
from jobs.train_draft import checkpoints
from jobs.train_draft.export import export
from jobs.train_draft.head import choose_vocabulary, make_config, new_head
from tests.tiny_models import LLAMA3_ROPE, tiny_llama


@pytest.mark.parametrize(("layers", "rope"), [(None, None), ((0, 3), LLAMA3_ROPE)])
def test_a_loader_reads_the_head_that_was_trained(tmp_path, layers, rope):
    target = AutoModelForCausalLM.from_pretrained(tiny_llama(tmp_path / "target", layers=6, **({"rope_parameters": rope} if rope else {})))
    vocabulary = torch.tensor([0, 2, 3, 9, 30])
    config = make_config(target, draft_vocab_size=5, intermediate_size=40, feature_layers=layers, max_tokens=64)
    head = new_head(config, target, vocabulary)
    scale = torch.rand(head.fc.in_features) + 0.5
    weights = {name: weight.clone() for name, weight in head.state_dict().items()}
    weights["fc.weight"] = weights["fc.weight"] * scale  # as it is in training
    state = {"step": 1, "head": weights, "scale": scale, "d2t": vocabulary, "config": {**asdict(config), "head_dim": head.head_dim}}
    checkpoints.save(tmp_path, checkpoints.LAST, state)
    export(tmp_path, tmp_path / "draft")
    embedding = target.get_input_embeddings().weight
    loaded = load_eagle3(tmp_path / "draft", target_config=target.config, embedding=embedding, dtype=torch.float32, device="cpu")
    assert loaded.feature_layers == (layers or (2, 3, 3))
    assert torch.equal(loaded.d2t, vocabulary)
    assert read_tensors(tmp_path / "draft")["t2d"].nonzero().flatten().tolist() == vocabulary.tolist()
    assert (loaded.config.rope_theta, loaded.config.rope_scaling) == (config.rope_theta, config.rope_scaling)
    for (name, found), (_, expected) in zip(sorted(loaded.state_dict().items()), sorted(head.state_dict().items()), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3, msg=name)  # bf16


def test_the_vocabulary_is_of_the_most_frequent_tokens():
    answers = [torch.tensor([5, 5, 5, 7, 7, 1]), torch.tensor([7, 9])]
    assert choose_vocabulary(answers, 12, 3).tolist() == [1, 5, 7]
    assert choose_vocabulary(answers, 12, 5).tolist() == [0, 1, 5, 7, 9]
