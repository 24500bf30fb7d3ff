"""Sampling parameters: what is refused, and that each node of a tree gets the law that a plain loop would give it (LAW.md 2.3)."""

from __future__ import annotations

import math

import pytest
import torch

from engine import Request, Result, RowError, SamplingParams
from engine.law.draws import KeyedDraws
from engine.law.keys import row_key
from tests.engine.tiny_engines import VOCAB, Tiny, run

EOS, LENGTH = 2, 14


@pytest.mark.parametrize(
    "name, value, allowed",
    [
        ("temperature", -0.1, "a number >= 0"),
        ("temperature", math.nan, "a number >= 0"),
        ("temperature", math.inf, "a number >= 0"),
        ("temperature", True, "a number >= 0"),
        ("temperature", "1", "a number >= 0"),
        ("temperature", None, "a number >= 0"),
        ("top_p", 0, "a number in (0, 1]"),
        ("top_p", 1.01, "a number in (0, 1]"),
        ("top_k", -1, "an integer >= 0 (0: off)"),
        ("top_k", 2.0, "an integer >= 0 (0: off)"),
        ("min_p", -0.5, "a number in [0, 1]"),
        ("min_p", 2, "a number in [0, 1]"),
        ("eta", 1.5, "a number in [0, 1]"),
        ("repetition_penalty", 0, "a number > 0 (1.0: off)"),
        ("repetition_penalty", -1.0, "a number > 0 (1.0: off)"),
        ("logit_bias", [3], "a map from token id to a finite number"),
        ("logit_bias", {3: math.inf}, "a map from token id to a finite number"),
        ("logit_bias", {3: "1"}, "a map from token id to a finite number"),
        ("logit_bias", {"3": 1.0}, "a map from token id to a finite number"),
        ("max_tokens", 0, "an integer >= 1"),
        ("max_tokens", 5.0, "an integer >= 1"),
        ("max_tokens", True, "an integer >= 1"),
        ("min_tokens", -1, "an integer >= 0"),
        ("stop", "abc", "a list of non-empty strings"),
        ("stop", ["a", ""], "a list of non-empty strings"),
        ("stop", [3], "a list of non-empty strings"),
        ("stop", None, "a list of non-empty strings"),
        ("stop_token_ids", 3, "a list of token ids"),
        ("stop_token_ids", ["3"], "a list of token ids"),
        ("stop_token_ids", [True], "a list of token ids"),
        ("ignore_eos", 1, "true or false"),
        ("logprobs", "yes", "true or false"),
        ("seed", 1.0, "a 64-bit integer"),
        ("seed", 2**63, "a 64-bit integer"),
    ],
)
def test_bad_values_are_named(name, value, allowed):
    with pytest.raises(RowError) as caught:
        SamplingParams(**{name: value}).check()
    assert caught.value.type == "bad_params"
    assert caught.value.message == f"{name}={value!r}; allowed: {allowed}"


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 3, "top_p": 1, "min_p": 1, "eta": 1},
        {"stop": (), "stop_token_ids": range(3)},
        {"min_tokens": 256},
        {"seed": -(2**63)},
        {"logit_bias": {0: -100}},
    ],
)
def test_good_values_pass(params):
    SamplingParams(**params).check(VOCAB)


def test_values_that_contradict_each_other():
    with pytest.raises(RowError) as caught:
        SamplingParams(min_tokens=9, max_tokens=8).check()
    assert caught.value.message == "min_tokens=9 exceeds max_tokens=8"


@pytest.mark.parametrize("name, value", [("logit_bias", {VOCAB: 1.0, 3: 1.0}), ("stop_token_ids", [3, VOCAB]), ("stop_token_ids", [-1])])
def test_token_ids_outside_the_vocabulary(name, value):
    SamplingParams(**{name: value}).check()
    with pytest.raises(RowError) as caught:
        SamplingParams(**{name: value}).check(VOCAB)
    outside = [token for token in value if not 0 <= token < VOCAB]
    assert caught.value.message == f"{name} has token ids {outside}; allowed: 0 to {VOCAB - 1}"


def test_mapping_is_checked_and_laid_over_the_defaults():
    defaults = SamplingParams(temperature=0.3, max_tokens=7)
    params = SamplingParams.from_mapping({"stop": "end", "logit_bias": {"5": -1.5}, "temperature": 0.9}, defaults)
    assert params == SamplingParams(temperature=0.9, max_tokens=7, stop=["end"], logit_bias={5: -1.5})
    for values, words in (
        ({"temprature": 1}, ["'temprature'", "did you mean 'temperature'?"]),
        ({"n": 2}, ["'n'", "allowed: temperature, top_p"]),
        ({"top_p": 2}, ["top_p=2", "(0, 1]"]),
        ({"logit_bias": {"x": 1}}, ["logit_bias", "'x'"]),
    ):
        with pytest.raises(RowError) as caught:
            SamplingParams.from_mapping(values, defaults)
        assert caught.value.type == "bad_params" and all(word in caught.value.message for word in words)


# --- a plain loop, one token at a time, in Python numbers ---------------------------------------------------------------------------


def keep(law: list[float], kept: set[int]) -> list[float]:
    total = sum(law[token] for token in kept)
    return [law[token] / total if token in kept else 0.0 for token in range(len(law))]


def plain_law(logits: list[float], params: SamplingParams, seen: set[int], num_output: int) -> list[float]:
    """p by hand: bias, penalty, masks, then temperature, top_k, top_p, min_p, eta. At T = 0 a point mass."""
    logits = [value + params.logit_bias.get(token, 0.0) for token, value in enumerate(logits)]
    for token in seen:
        penalty = params.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    if num_output < params.min_tokens:
        for token in (*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))):
            logits[token] = -math.inf
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if params.temperature == 0:
        return keep([1.0] * len(logits), {order[0]})
    law = keep([math.exp((value - logits[order[0]]) / params.temperature) for value in logits], set(order))
    if params.top_k:
        law = keep(law, set(order[: params.top_k]))
    if params.top_p < 1:
        total, kept = 0.0, set()
        for token in order:
            if total >= params.top_p:
                break
            kept.add(token)
            total += law[token]
        law = keep(law, kept)
    if params.min_p:
        law = keep(law, {token for token in order if law[token] >= params.min_p * max(law)})
    if params.eta:
        entropy = -sum(value * math.log(value) for value in law if value > 0)
        floor = min(params.eta, math.sqrt(params.eta) * math.exp(-entropy), max(law))
        law = keep(law, {token for token in order if law[token] >= floor})
    return law


def plain_text(tiny: Tiny, prompt: list[int], params: SamplingParams, id: str) -> list[int]:
    """Transformers' logits, the law by hand, and y = argmax(log p + noise of the row's own key)."""
    output: list[int] = []
    draws = KeyedDraws(torch.tensor([row_key(0 if params.seed is None else params.seed, id, 0)]))
    while len(output) < params.max_tokens:
        law = plain_law(tiny.logits(prompt + output)[-1].tolist(), params, {*prompt, *output}, len(output))
        noise = draws.noise(torch.tensor([len(output)]), len(law))[0].tolist()
        scores = [math.log(value) + noise[token] if value > 0 else -math.inf for token, value in enumerate(law)]
        token = scores.index(max(scores))
        output.append(token)
        if token in params.stop_token_ids or (token == EOS and not params.ignore_eos):
            break
    return output


GREEDY_ROWS = [
    SamplingParams(temperature=0.0, max_tokens=LENGTH, repetition_penalty=1.5),
    SamplingParams(temperature=0.0, max_tokens=LENGTH, repetition_penalty=3.0, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=LENGTH, repetition_penalty=0.5, min_tokens=LENGTH),
    SamplingParams(temperature=0.0, max_tokens=LENGTH, logit_bias={4: 2.0, 9: -5.0, 2: 1.0}),
    SamplingParams(temperature=0.0, max_tokens=LENGTH, min_tokens=6, stop_token_ids=[4, 10, 13, 19, 22]),
    SamplingParams(temperature=0.0, max_tokens=LENGTH, min_tokens=3, repetition_penalty=1.2, logit_bias={7: 1.0}, stop_token_ids=[7]),
    SamplingParams(temperature=0.0, max_tokens=LENGTH, top_k=2, top_p=0.5, min_p=0.2, eta=0.3),
]
SAMPLED_ROWS = [
    SamplingParams(max_tokens=LENGTH, repetition_penalty=1.3, ignore_eos=True),
    SamplingParams(max_tokens=LENGTH, temperature=0.6, top_k=5, ignore_eos=True),
    SamplingParams(max_tokens=LENGTH, temperature=1.4, top_p=0.7, seed=17),
    SamplingParams(max_tokens=LENGTH, temperature=2.0, min_p=0.2, min_tokens=10),
    SamplingParams(max_tokens=LENGTH, temperature=2.0, eta=0.3, logit_bias={5: 3.0}),
    SamplingParams(max_tokens=LENGTH, temperature=1.7, top_k=9, top_p=0.8, min_p=0.1, eta=0.05, repetition_penalty=1.1, ignore_eos=True),
    SamplingParams(max_tokens=LENGTH, temperature=0.0),
]
WIDE = {"tree_size": 1 + 24 + 40, "depth": 3, "top_k": 24}


def texts_of(tiny: Tiny, prompts: list[list[int]], rows: list[SamplingParams]) -> list[list[int]]:
    return [plain_text(tiny, prompt, params, str(index)) for index, (prompt, params) in enumerate(zip(prompts, rows, strict=True))]


@pytest.mark.parametrize(
    "method, options",
    [("off", {}), ("rheo", WIDE), ("rheo", {"m": 0}), ("topk", WIDE), ("coupled", WIDE), ("chain", {"depth": 3})],
    ids=str,
)
def test_greedy_text_equals_a_plain_loop(tiny, ragged_prompts, method, options):
    """Penalties count each node's own path, and masks its own depth: rows with different parameters share the batch."""
    results = run(tiny.engine(method, max_batch=4, **options), ragged_prompts, GREEDY_ROWS)
    assert [result.token_ids for result in results] == texts_of(tiny, ragged_prompts, GREEDY_ROWS)
    if options == WIDE:
        assert max(cycle.accepted for result in results for cycle in result.cycles) >= 2


@pytest.mark.parametrize("method, options", [("off", {}), ("topk", WIDE), ("coupled", WIDE)], ids=str)
def test_sampled_text_equals_a_plain_loop(tiny, ragged_prompts, method, options):
    results = run(tiny.engine(method, max_batch=4, **options), ragged_prompts, SAMPLED_ROWS)
    assert [result.token_ids for result in results] == texts_of(tiny, ragged_prompts, SAMPLED_ROWS)
    if options == WIDE:
        assert max(cycle.accepted for result in results for cycle in result.cycles) >= 2


def test_penalty_counts_the_tokens_of_the_path(make_clock):
    """All drafts would be right, but the penalty at the path's own tokens says otherwise: a token that repeats for ever stops repeating."""
    clock = make_clock([3, 4, 5])  # then 5 for ever; its logit of 12 becomes 6, then ties end at token 0
    params = SamplingParams(temperature=0.0, max_tokens=12, repetition_penalty=2.0, logit_bias=dict.fromkeys((8, 9), 7.0))
    texts = [run(clock.engine(method, tree_size=8, depth=4, top_k=3), [[0]], params)[0] for method in ("off", "rheo", "topk", "coupled")]
    expected = plain_text(clock, [0], params, "0")
    assert 8 in expected[3:] and [text.token_ids for text in texts] == [expected] * 4


def request_like(result: Result, prompt: list[int], params: SamplingParams) -> Request:
    """The same row again: the id is part of its randomness."""
    return Request(id=result.id, token_ids=prompt, params=params)


@pytest.mark.parametrize("method", ["coupled", "rheo"])
def test_rows_of_one_batch_keep_their_own_parameters(tiny, ragged_prompts, method):
    rows = [SAMPLED_ROWS[index] for index in (1, 3, 5, 6, 0, 2, 4)]
    together = run(tiny.engine(method, max_batch=7), ragged_prompts, rows)
    for index in (0, 3, 5):
        alone = tiny.engine(method).generate([request_like(together[index], ragged_prompts[index], rows[index])])
        assert alone[0].token_ids == together[index].token_ids


@pytest.mark.parametrize("method", ["rheo", "coupled"])
@pytest.mark.parametrize(
    "params, only",
    [
        ({"logit_bias": {9: 1e308}}, {9}),
        ({"logit_bias": {token: -1e308 for token in range(VOCAB) if token not in (5, 6)}}, {5, 6}),
        ({"logit_bias": dict.fromkeys(range(VOCAB), -1e308)}, None),
        ({"temperature": 1e300, "min_tokens": 5}, None),
        ({"temperature": 1e-300}, "greedy"),
        ({"top_p": 1e-300}, "greedy"),
        ({"top_k": 10**30}, None),
        ({"repetition_penalty": 1e308}, None),
        ({"repetition_penalty": 1e-308}, None),
        ({"repetition_penalty": 1e308, "logit_bias": {9: -1e308}, "temperature": 1e-300}, None),
        ({"max_tokens": 10**30, "min_tokens": 10**30}, None),
    ],
)
def test_numbers_that_fp32_cannot_hold(tiny, method, params, only):
    """Valid by the rules above, so they must do what they say; NaN in one row's law would end the whole batch."""
    values = {"max_tokens": 8, "ignore_eos": True, **params}
    neighbour = SamplingParams(max_tokens=8, ignore_eos=True)
    engine = tiny.engine(method, max_model_len=40)
    odd, plain = run(engine, [[5, 6, 7], [8, 9]], [SamplingParams(**values), neighbour])
    (undisturbed,) = tiny.engine(method).generate([request_like(plain, [8, 9], neighbour)])
    assert plain.token_ids == undisturbed.token_ids
    assert len(odd.token_ids) == min(values["max_tokens"], 37)
    if isinstance(only, set):
        assert set(odd.token_ids) <= only
    elif only == "greedy":
        greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        assert odd.token_ids == run(tiny.engine("off"), [[5, 6, 7]], greedy)[0].token_ids
    else:
        assert len(set(odd.token_ids)) > 1
