"""Numbers that are not finite: in the target they cost a cycle or a row, in the draft nothing but its drafts."""

from __future__ import annotations

import pytest
import torch

from engine import Request, SamplingParams
from tests.engine.tiny_engines import VOCAB, Tiny, random_prompts, run


def params(max_tokens: int, **values) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **values)


def request(id: str, max_tokens: int = 6, prompt: list[int] | None = None) -> Request:
    return Request(id=id, token_ids=prompt or [5, 6, 7], params=params(max_tokens))


def overflowing(tiny: Tiny, *, target: bool = True, draft: bool = False) -> Tiny:
    """As in fp16: token 23 makes infinite activations, in the target, the draft, or both."""
    broken = Tiny(target_folder=tiny.target_folder, draft_folder=tiny.draft_folder)
    embedding = broken.target.embedding.weight.clone()
    embedding[23] = torch.inf
    if target:
        broken.target.embedding.weight = torch.nn.Parameter(embedding, requires_grad=False)
    if draft:
        broken.head.embedding_VH = embedding
    return broken


def test_a_row_that_overflows_harms_no_other(tiny):
    """The next row in its slot, beside a longer one, gets its own tokens."""
    plain = params(6, logit_bias={23: -1000.0})
    bad = Request(id="bad", token_ids=[23] * 20, params=params(3))
    good = [Request(id="long", token_ids=[5, 6] * 15, params=plain), Request(id="good", token_ids=[5, 6], params=plain)]
    alone = tiny.engine("off", max_batch=2).generate(good)
    broken = overflowing(tiny)
    results = broken.engine("off", max_batch=2).generate([bad, *good])
    assert results[0].error.type == "not_finite"
    assert [result.token_ids for result in results[1:]] == [result.token_ids for result in alone]


@pytest.mark.parametrize("method", ["rheo", "topk", "coupled"])
def test_a_drafted_token_that_overflows_costs_no_row(tiny, method):
    """Token 23 cannot be drawn, but it can be drafted, and spoils the pass that it is drafted in."""
    values = {"logit_bias": {23: -1000.0}}
    requests = [Request(id=str(n), token_ids=[5 + n, 6], params=params(16, **values)) for n in range(6)]
    plain = tiny.engine("off").generate(requests)
    broken = overflowing(tiny)
    results = broken.engine(method, tree_size=20, top_k=8).generate(requests)
    assert [len(result.token_ids) for result in results] == [16] * 6
    if method != "rheo":
        assert [result.token_ids for result in results] == [result.token_ids for result in plain]


@pytest.mark.parametrize("method", ["rheo", "coupled"])
@pytest.mark.parametrize("target", [True, False], ids=["target and draft", "draft alone"])
def test_an_overflow_ends_no_drafts(tiny, method, target):
    """What it leaves in the draft's cache is in the way of no later cycle, and of no later row in the slot, beside a longer one."""
    values = {"logit_bias": {23: -1000.0}}
    requests = [Request(id="long", token_ids=[5, 6] * 30, params=params(60, **values))]
    requests += [Request(id=str(n), token_ids=[5 + n, 6], params=params(16, **values)) for n in range(6)]
    results = overflowing(tiny, target=target, draft=True).engine(method, tree_size=20, depth=4, top_k=6, max_batch=2).generate(requests)
    assert all(any(cycle.drafted for cycle in result.cycles) for result in results)
    if method == "coupled":
        plain = tiny.engine("off").generate(requests)
        assert [result.token_ids for result in results] == [result.token_ids for result in plain]


def test_what_is_not_finite_behind_a_text_costs_one_cycle(tiny):
    engine = tiny.engine("rheo", max_batch=2)
    for each in (request("long", 40, [5, 6] * 30), request("short", 12)):
        engine.submit(each)
    for _ in range(3):
        assert engine.step() == []
    (cache,), (_, short) = engine.decoder.drafter.caches, engine.running
    num_cycles = len(short.cycles)
    cache.value[:, short.pages[0], :, short.num_draft_cached + 10 :] = torch.nan  # the long row's keys reach there
    while engine.has_work:
        engine.step()
    assert len(short.cycles) > num_cycles + 1
    assert [cycle.drafted > 0 for cycle in short.cycles] == [place != num_cycles for place in range(len(short.cycles))]


def test_a_row_that_ends_without_drafts_leaves_nothing_to_the_next(tiny):
    engine = tiny.engine("rheo")
    engine.submit(request("a", 12))
    for _ in range(2):
        assert engine.step() == []
    (cache,), (row,) = engine.decoder.drafter.caches, engine.running
    cache.value.fill_(torch.nan)  # of the text itself: this row has no drafts any more
    while engine.has_work:
        engine.step()
    assert [cycle.drafted > 0 for cycle in row.cycles] == [True] + [False] * (len(row.cycles) - 1) and len(row.cycles) > 2
    engine.submit(request("b", 12))
    assert engine.step() == [] and engine.running[0].pages == [0]
    assert bool(cache.value[:, 0].isfinite().all())


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("method", ["off", "rheo", "coupled"])
def test_an_infinite_logit_is_a_row_error(tiny, method, value, temperature):
    broken = Tiny(target_folder=tiny.target_folder, draft_folder=tiny.draft_folder)
    weight = broken.target._model.lm_head.weight.clone()
    weight[3] = value
    broken.target._model.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    requests = [Request(token_ids=[5, 6], params=params(4, logprobs=True, temperature=temperature)), request("b", 4)]
    assert [result.error.type for result in broken.engine(method).generate(requests)] == ["not_finite"] * 2


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("method, options", [("chain", {}), ("rheo", {"m": 0}), ("rheo", {"m": 2}), ("topk", {})])
def test_infinite_draft_logits_change_no_law(tiny, method, options, value):
    """At most nodes the likeliest token's logit overflows, as in fp16. The second token, the first that is drafted, keeps its law."""
    broken = Tiny(target_folder=tiny.target_folder, draft_folder=tiny.draft_folder)

    def overflow(module, inputs, logits):
        top = logits.argmax(-1, keepdim=True)
        return torch.where(logits[..., 3:4] > logits[..., 4:5], logits.scatter(-1, top, value), logits)

    broken.head.lm_head.register_forward_hook(overflow)
    num_rows, prompt = 3000, [5, 6]
    engine = broken.engine(method, tree_size=4, depth=2, top_k=3, max_batch=256, seed=1, **options)
    results = run(engine, [prompt] * num_rows, params(2))
    drafted = [bool(result.cycles[0].drafted) for result in results]
    assert 0.1 < sum(drafted) / num_rows < 0.9
    first_V = tiny.logits(prompt)[-1].softmax(-1)
    law_V = sum(first_V[token] * tiny.logits([*prompt, token])[-1].softmax(-1) for token in range(VOCAB))
    found_V = torch.bincount(torch.tensor([result.token_ids[1] for result in results]), minlength=VOCAB) / num_rows
    distance = 0.5 * float((found_V - law_V).abs().sum())
    print(f"{distance:.4f}")
    assert distance < 0.05


@pytest.mark.parametrize("method", ["rheo", "chain", "topk", "coupled"])
def test_infinite_draft_logits_at_temperature_zero(tiny, method):
    broken = Tiny(target_folder=tiny.target_folder, draft_folder=tiny.draft_folder)
    broken.head.lm_head.register_forward_hook(lambda module, inputs, logits: logits.masked_fill(logits > 1, torch.nan))
    prompts = random_prompts([3, 9])
    results = run(broken.engine(method), prompts, params(12, temperature=0.0))
    assert [result.token_ids for result in results] == [tiny.greedy(prompt, 12) for prompt in prompts]
