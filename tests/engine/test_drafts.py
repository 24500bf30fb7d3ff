"""Drafts other than an EAGLE-3 head: another causal language model, and the row's own text."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence

import pytest
import torch
from transformers import LlamaForCausalLM

from engine import Engine, Request, SamplingParams, Speculation
from engine.drafts import ngram
from engine.drafts.causal_lm import CausalLMDraft
from engine.drafts.model import DraftModel
from engine.drafts.ngram import NgramDraft
from engine.models.loading import load_causal_lm
from engine.target import Target
from tests.engine.tiny_engines import VOCAB, Tiny, random_prompts, run
from tests.tiny_models import tiny_llama

METHODS = ("rheo", "coupled", "topk", "chain")
KINDS = ("same", "other", "fewer tokens", "more tokens", "ngram")


@pytest.fixture(scope="module")
def draft_folders(tiny, tmp_path_factory):
    """Another random model with the target's tokenizer; the target itself; models whose output is padded to other sizes."""
    folder = tmp_path_factory.mktemp("drafts")
    sizes = {"other": VOCAB, "fewer tokens": VOCAB - 5, "more tokens": VOCAB + 8}
    made = {name: tiny_llama(folder / name, vocab=size, hidden=16, layers=2, seed=9) for name, size in sizes.items()}
    return {"same": tiny.target_folder, **made}


def make_engine(tiny: Tiny, draft_folders, kind: str, method: str, **options) -> Engine:
    draft: DraftModel = NgramDraft(tiny.target.device)
    if kind != "ngram":
        model = load_causal_lm(draft_folders[kind], torch.float32, "cpu")
        draft = CausalLMDraft(Target(model), attention="sdpa", num_target_tokens=VOCAB)
    speculation = Speculation(method=method, **{"tree_size": 12, "depth": 4, "top_k": 4, **options.pop("speculation", {})})
    return Engine(Target(tiny.target._model), draft, tiny.tokenizer, speculation=speculation, **options)


def repeating_prompts() -> list[list[int]]:
    """Texts with something to look up, on both sides of packing.LONG_RUN."""
    return [prompt * 3 for prompt in random_prompts([4, 30, 2, 9], seed=3)] + [[7]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_greedy_text_is_the_targets(tiny, draft_folders, kind, method):
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    results = run(make_engine(tiny, draft_folders, kind, method, max_batch=3), repeating_prompts(), params)
    assert [result.token_ids for result in results] == [tiny.greedy(prompt, 20) for prompt in repeating_prompts()]
    accepted = sum(cycle.accepted for result in results for cycle in result.cycles)
    assert accepted > 0 or kind not in ("same", "ngram")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["coupled", "topk"])
def test_one_text_for_a_seed(tiny, draft_folders, kind, method):
    params = SamplingParams(max_tokens=14, ignore_eos=True)
    plain = run(tiny.engine("off", seed=5), repeating_prompts(), params)
    results = run(make_engine(tiny, draft_folders, kind, method, max_batch=3, seed=5), repeating_prompts(), params)
    assert [result.token_ids for result in results] == [result.token_ids for result in plain]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_chain_from_the_target_itself_is_always_accepted(tiny, draft_folders, temperature):
    """q is the draft's law at the row's temperature: with draft = target, min(1, p/q) = 1."""
    engine = make_engine(tiny, draft_folders, "same", "chain", speculation={"tree_size": 4, "depth": 3, "draft_top": 0})
    params = SamplingParams(temperature=temperature, max_tokens=30, ignore_eos=True)
    for result in run(engine, repeating_prompts(), params):
        assert [cycle.accepted for cycle in result.cycles[:-1]] == [3] * (len(result.cycles) - 1)


@pytest.mark.parametrize("method", METHODS)
def test_after_any_cycle_the_draft_knows_the_text_and_nothing_else(tiny, draft_folders, method):
    engine = make_engine(tiny, draft_folders, "other", method, speculation={"tree_size": 30, "top_k": 10})
    engine.decoder.max_prefill_tokens = 40
    reference = LlamaForCausalLM.from_pretrained(draft_folders["other"], dtype=torch.float32).eval()
    for index, prompt in enumerate(repeating_prompts()):
        engine.submit(Request(id=str(index), token_ids=prompt, params=SamplingParams(max_tokens=50, ignore_eos=True)))
    for _ in range(9):
        engine.step()
    rows = engine.running
    assert all(row.num_output_tokens > 4 for row in rows)
    with torch.inference_mode():
        logits_BU = engine.decoder.drafter._model.begin(rows).logits_BU
        for row, logits_U in zip(rows, logits_BU, strict=True):
            assert row.num_draft_cached == len(row.tokens)
            torch.testing.assert_close(logits_U, reference(torch.tensor([row.tokens])).logits[0, -1], rtol=1e-3, atol=1e-4)


def test_each_node_of_a_tree_knows_its_path_and_nothing_else(tiny, draft_folders):
    engine = make_engine(tiny, draft_folders, "other", "topk")
    reference = LlamaForCausalLM.from_pretrained(draft_folders["other"], dtype=torch.float32).eval()
    for index, prompt in enumerate(repeating_prompts()):
        engine.submit(Request(id=str(index), token_ids=prompt, params=SamplingParams(max_tokens=50, ignore_eos=True)))
    engine.step()
    rows = engine.running
    parents = [[0, 0, 0], [2, 1, 2], [1, 1, 0]]
    tokens = [[5, 6, 7], [8, 5, 9], [5, 6, 6]]
    paths: list[tuple[int, ...]] = [()]
    with torch.inference_mode():
        start = engine.decoder.drafter._model.begin(rows)
        for parent_F, token_F in zip(parents, tokens, strict=True):
            logits_BFU = start.expand(torch.tensor([token_F] * len(rows)), torch.tensor([parent_F] * len(rows)))
            paths = [(*paths[parent], token) for parent, token in zip(parent_F, token_F, strict=True)]
            for row, logits_FU in zip(rows, logits_BFU, strict=True):
                for path, logits_U in zip(paths, logits_FU, strict=True):
                    expected_U = reference(torch.tensor([[*row.tokens, *path]])).logits[0, -1]
                    torch.testing.assert_close(logits_U, expected_U, rtol=1e-3, atol=1e-4)


def looked_up(text: list[int], path: Sequence[int] = ()) -> dict[int, float]:
    """q of a text and a path behind it, counted place by place in the text."""
    weights: dict[int, float] = defaultdict(float)
    places = range(len(text) - 1)
    text = [*text, *path]
    for place in places:
        length = 0
        while length < ngram.LONGEST and place - length >= 0 and text[place - length] == text[len(text) - 1 - length]:
            length += 1
        if length:
            weights[text[place + 1]] += ngram.WEIGHT_PER_TOKEN**length
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def test_lookup_by_hand():
    a, b, c, d = 5, 6, 7, 8
    heavy, light = ngram.WEIGHT_PER_TOKEN**2, ngram.WEIGHT_PER_TOKEN
    q = looked_up([a, b, c, d, b, d, a, b])
    assert q == pytest.approx({c: heavy / (heavy + light), d: light / (heavy + light)})


def test_lookup_equals_counting_place_by_place(tiny, draft_folders):
    engine = make_engine(tiny, draft_folders, "ngram", "topk")
    prompts = [*repeating_prompts(), [5, 5, 5, 5, 5], [5, 6, 5]]
    for index, prompt in enumerate(prompts):
        engine.submit(Request(id=str(index), token_ids=prompt, params=SamplingParams(max_tokens=9, ignore_eos=True)))
    engine.step()
    rows = engine.running
    start = NgramDraft(torch.device("cpu")).begin(rows)
    tokens = start.target_token_U.tolist()
    paths: list[list[int]] = [[] for _ in rows]
    logits_BFU, node_BF = start.logits_BU.unsqueeze(1), torch.zeros(len(rows), 1, dtype=torch.long)
    for _ in range(3):
        for row, path, logits_FU in zip(rows, paths, logits_BFU, strict=True):
            law_U = logits_FU[0].softmax(-1).nan_to_num(0)
            found = {token: q for token, q in zip(tokens, law_U.tolist(), strict=True) if q}
            assert found == pytest.approx(looked_up(row.tokens, path), rel=1e-5)
        node_token_B1 = logits_BFU[:, :1].argmax(-1)
        paths = [[*path, tokens[index]] for path, index in zip(paths, node_token_B1.flatten().tolist(), strict=True)]
        logits_BFU = start.expand(node_token_B1, node_BF)


def test_nothing_is_drafted_where_nothing_matches(tiny, draft_folders):
    """The second token has nothing before it that is like the first."""
    prompt = next(prompt for prompt in random_prompts([3] * 50) if tiny.greedy(prompt, 1)[0] not in prompt)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    for method in METHODS:
        (result,) = run(make_engine(tiny, draft_folders, "ngram", method), [prompt], params)
        assert [(cycle.drafted, cycle.accepted, cycle.emitted) for cycle in result.cycles] == [(0, 0, 1)]


def test_past_its_trained_length_a_draft_harms_nothing(tiny, tmp_path):
    """FIELD-CASES B28: positions go on where the draft's training ended."""
    draft = tiny_llama(tmp_path / "draft", vocab=VOCAB, hidden=16, layers=2, seed=9)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16}))
    engine = make_engine(tiny, {"short": draft}, "short", "rheo")
    assert engine.draft_trained_length == 16
    (prompt,) = random_prompts([90])
    (result,) = run(engine, [prompt], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    assert result.token_ids == tiny.greedy(prompt, 20)
