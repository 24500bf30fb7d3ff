"""`coupled`, `topk` and `off` give one text, whatever drafts, trees, slots and neighbours a row has; no method minds its neighbours
(DESIGN.md section 7, FIELD-CASES B15, B32)."""

from __future__ import annotations

import pytest

from engine import Request, SamplingParams
from tests.engine.tiny_engines import run

LENGTH = 14
TEMPERATURES = (1.0, 0.7)


def sampled(temperature: float, **params) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=LENGTH, ignore_eos=True, **params)


@pytest.fixture(scope="module")
def plain_texts(tiny, ragged_prompts):
    """By temperature: each prompt's tokens without speculation, each row alone."""
    return {
        temperature: [result.token_ids for result in run(tiny.engine("off", max_batch=1, seed=5), ragged_prompts, sampled(temperature))]
        for temperature in TEMPERATURES
    }


def test_noise_matters(plain_texts, tiny, ragged_prompts):
    """The texts that all else is compared with are sampled ones."""
    other_seed = [result.token_ids for result in run(tiny.engine("off", seed=6), ragged_prompts, sampled(1.0))]
    differ = [a != b for a, b in zip(plain_texts[1.0], plain_texts[0.7], strict=True)]
    assert all(differ) and all(a != b for a, b in zip(plain_texts[1.0], other_seed, strict=True))


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(
    "method, options",
    [
        ("off", {"max_batch": 5}),
        ("topk", {"max_batch": 1}),
        ("topk", {"max_batch": 5, "tree_size": 30, "depth": 4, "top_k": 8}),
        ("topk", {"max_batch": 2, "tree_size": 1}),
        ("coupled", {"max_batch": 1}),
        ("coupled", {"max_batch": 5, "tree_size": 30, "depth": 4, "top_k": 8}),
        ("coupled", {"max_batch": 3, "tree_size": 2, "depth": 8}),
    ],
    ids=str,
)
def test_one_text_for_a_seed(tiny, ragged_prompts, plain_texts, temperature, method, options):
    results = run(tiny.engine(method, seed=5, **options), ragged_prompts, sampled(temperature))
    assert [result.token_ids for result in results] == plain_texts[temperature]
    if options.get("tree_size") == 30:
        assert sum(cycle.accepted for result in results for cycle in result.cycles) > 0


def test_one_text_with_another_draft(narrow, ragged_prompts, plain_texts):
    results = run(narrow.engine("coupled", seed=5, max_batch=4, top_k=12, tree_size=20), ragged_prompts, sampled(1.0))
    assert [result.token_ids for result in results] == plain_texts[1.0]


@pytest.mark.parametrize("method", ["coupled", "rheo", "chain", "off"])
def test_order_and_neighbours_do_not_matter(tiny, ragged_prompts, method):
    params = sampled(1.0)
    requests = [Request(id=f"row {index}", token_ids=prompt, params=params) for index, prompt in enumerate(ragged_prompts)]

    def tokens(engine, order: list[Request]) -> dict[str, list[int]]:
        return {result.id: result.token_ids for result in engine.generate(order)}

    together = tokens(tiny.engine(method, max_batch=4), requests)
    assert tokens(tiny.engine(method, max_batch=6), requests[::-1]) == together
    for request in requests[:3]:
        assert tokens(tiny.engine(method), [request])[request.id] == together[request.id]
    again = tiny.engine(method, max_batch=3)
    assert tokens(again, requests[2:5]) == {request.id: together[request.id] for request in requests[2:5]}
    assert tokens(again, requests) == together, "a second call of the same engine"


@pytest.mark.parametrize("method", ["rheo", "chain", "coupled", "off"])
def test_reproducible_is_equal_to_the_bit(tiny, ragged_prompts, method):
    """Log-probabilities too; and the same drafts are accepted, whoever shares the batch."""
    prompts = ragged_prompts[:5]
    params = [sampled(1.0, logprobs=True), *[sampled(0.8, logprobs=True, top_p=0.9, repetition_penalty=1.2)] * 4]

    def bits(engine, order: list[int]) -> dict[str, tuple]:
        results = engine.generate([Request(id=str(index), token_ids=prompts[index], params=params[index]) for index in order])
        return {
            result.id: (result.token_ids, result.logprobs, [(cycle.drafted, cycle.accepted) for cycle in result.cycles])
            for result in results
        }

    together = bits(tiny.engine(method, max_batch=3, reproducible=True), [0, 1, 2, 3, 4])
    assert bits(tiny.engine(method, max_batch=5, reproducible=True), [4, 2, 0, 1, 3]) == together
    for index in (0, 3):
        assert bits(tiny.engine(method, max_batch=1, reproducible=True), [index]) == {str(index): together[str(index)]}


def test_samples_and_ids_have_noise_of_their_own(tiny):
    """The same prompt under another sample number, id or seed is another draw."""
    params = sampled(1.0)
    requests = [
        *(Request(id="a", sample=sample, token_ids=[5, 6, 7], params=params) for sample in range(3)),
        Request(id="b", token_ids=[5, 6, 7], params=params),
        Request(id="c", token_ids=[5, 6, 7], params=sampled(1.0, seed=99)),
    ]
    for method in ("coupled", "rheo"):
        texts = [tuple(result.token_ids) for result in tiny.engine(method).generate(requests)]
        assert len(set(texts)) == len(texts)
