"""The embedded preset itself."""

from __future__ import annotations

import pytest
import torch

from engine.models.source import resolve_draft, resolve_target
from tests.engine.real_pair import PRESET, needs_real_pair


@pytest.fixture(scope="session")
def preset():
    """(target, tokenizer, head) of the real preset; converts it into the user's cache the first time."""
    from engine.models.checkpoint import load_eagle3
    from engine.models.loading import load_causal_lm, load_tokenizer

    resolved = resolve_target(PRESET.name)
    target = load_causal_lm(resolved.path, torch.float32, "cpu")
    folder = resolve_draft("auto", resolved.preset, "rheo").path
    embedding = target.model.embed_tokens.weight
    head = load_eagle3(folder, target_config=target.config, embedding=embedding, dtype=torch.float32, device="cpu")
    return target, load_tokenizer(resolved.path), head


@needs_real_pair
def test_preset_configuration(preset):
    target, tokenizer, head = preset
    config = target.config
    assert (config.rope_parameters["rope_theta"], config.tie_word_embeddings, config.max_position_embeddings) == (100000.0, True, 8192)
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers, config.num_key_value_heads) == (49152, 576, 30, 3)
    assert config.rms_norm_eps == pytest.approx(1e-5, rel=1e-7)
    assert (config.bos_token_id, config.eos_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2, 1, 2)
    assert len(tokenizer) == config.vocab_size
    assert (head.feature_layers, head.config.draft_vocab_size, head.config.rope_theta) == ((2, 15, 27), 16384, 100000.0)


@needs_real_pair
def test_preset_chat_template_has_one_bos(preset):
    """Its BOS <|im_start|> also opens every turn, so the rule is: one at the very start, none before it, and none added to raw text."""
    from engine.encoding import encode_text

    _, tokenizer, _ = preset
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    token_ids = encode_text(tokenizer, text, templated=True)
    assert token_ids[0] == 1 and token_ids[1] != 1
    assert token_ids.count(1) == 3 and token_ids.count(2) == 2
    assert tokenizer.decode(token_ids) == text
    assert 1 not in encode_text(tokenizer, "Hi", templated=False)


@needs_real_pair
def test_preset_answers_and_its_draft_agrees(preset):
    """The greedy answer is the same twice; the draft ranks the target's next token among its first ten far above chance."""
    from engine.encoding import encode_text

    target, tokenizer, head = preset
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    prompt = torch.tensor([encode_text(tokenizer, text, templated=True)])
    outputs = [target.generate(prompt, max_new_tokens=12, do_sample=False)[0] for _ in range(2)]
    assert torch.equal(*outputs)
    assert "Paris" in tokenizer.decode(outputs[0][prompt.shape[1] :])

    hidden = target(outputs[0][None], output_hidden_states=True).hidden_states
    feature = head.fuse(torch.cat([hidden[layer][0] for layer in head.feature_layers], dim=-1))

    def attend(query, key, value):
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)

    tokens = outputs[0][1:-1]  # pairs (token i+1, feature i) predict token i+2
    logits = head.logits(head(tokens, feature[: len(tokens)], torch.arange(len(tokens)), attend))
    ranked = head.d2t[logits.topk(10).indices]
    hits = (ranked == outputs[0][2:, None]).any(-1)[prompt.shape[1] - 1 :]
    assert hits.float().mean() > 0.6, hits
