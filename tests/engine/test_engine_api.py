"""What a caller relies on: order, early results, refilled slots, errors of one row that stay its own, and refusals by name
(DESIGN.md section 5, FIELD-CASES A1, A2, A22, A42, B20)."""

from __future__ import annotations

import pytest
import torch

from engine import EngineError, Request, RowError, SamplingParams, UserError
from engine.pages import count_pages
from tests.engine.tiny_engines import VOCAB, Tiny, run


def params(max_tokens: int, **values) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **values)


def request(id: str | None, max_tokens: int = 6, prompt: list[int] | None = None, **fields) -> Request:
    return Request(id=id, token_ids=prompt or [5, 6, 7], params=params(max_tokens), **fields)


# --- order, slots, ids --------------------------------------------------------------------------------------------------------------


def test_generate_keeps_the_order(tiny):
    lengths = [9, 1, 5, 2, 12, 3]
    results = tiny.engine("rheo", max_batch=2).generate([request(f"row {n}", n) for n in lengths])
    assert [result.id for result in results] == [f"row {n}" for n in lengths]
    assert [len(result.token_ids) for result in results] == lengths
    assert tiny.engine("rheo").generate([]) == []


def test_stream_yields_rows_as_they_end(tiny):
    engine = tiny.engine("off", max_batch=3)
    results = engine.stream(request(str(n), n) for n in (30, 2, 6, 5))
    assert [result.id for result in results] == ["2", "6", "5", "30"]  # 5 begins when 2 has ended
    assert not engine.has_work


def test_stream_takes_requests_as_it_needs_them(tiny):
    """The source may be longer than memory: no more than the slots and one queue of their size are read ahead."""
    taken = []

    def source():
        for index in range(40):
            taken.append(index)
            yield request(str(index), 4)

    for count, _ in enumerate(tiny.engine("off", max_batch=3).stream(source()), start=1):
        assert len(taken) <= count + 2 * 3 + 3
    assert count == 40


@pytest.mark.parametrize("lengths", [[60, *[4] * 20], [7] * 12, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]], ids=["one long row", "equal", "rising"])
def test_free_slots_are_refilled_at_once(tiny, lengths):
    """Plain steps: one token of each row in a step, prefill included. Close to max(longest, sum / slots)."""
    engine, num_slots = tiny.engine("off", max_batch=4), 4
    for index, length in enumerate(lengths):
        engine.submit(request(str(index), length))
    num_steps = num_results = 0
    while engine.has_work:
        num_steps += 1
        assert engine.num_running <= num_slots
        num_results += len(engine.step())
    assert num_results == len(lengths)
    least = max(max(lengths), -(-sum(lengths) // num_slots))
    assert least <= num_steps <= least + max(sorted(lengths)[:-1])


def test_prefill_shares_a_step_with_running_rows(tiny):
    engine = tiny.engine("rheo", max_batch=2)
    engine.submit(request("a", 20))
    engine.step()
    engine.step()
    engine.submit(request("b", 20))
    engine.step()
    a, b = sorted(engine.running, key=lambda row: row.request.id)
    assert len(a.cycles) == 2 and a.cycles[-1].batch_size == 2
    assert b.num_output_tokens == 1 and b.cycles == []


def test_missing_ids_become_the_index(tiny):
    results = tiny.engine("off").generate([request(None), request("x"), request(None)])
    assert [result.id for result in results] == ["0", "x", "2"]
    named = tiny.engine("off").generate([request("0"), request("x"), request("2")])
    assert [result.token_ids for result in results] == [result.token_ids for result in named]


def test_repeated_keys_are_refused(tiny):
    requests = [request("a"), request("b"), request("a"), request("a", sample=1), request("b", 3), request("a")]
    results = tiny.engine("rheo", max_batch=2).generate(requests)
    errors = [result.error and result.error.type for result in results]
    assert errors == [None, None, "repeated_id", None, "repeated_id", "repeated_id"]
    assert len(results[1].token_ids) == 6 and "'a'" in results[2].error.message
    assert [(result.id, result.sample) for result in results] == [(each.id, each.sample) for each in requests]


def test_an_engine_can_be_used_again(tiny):
    """FIELD-CASES A42: the second call gives what a fresh engine gives, the same ids included."""
    engine = tiny.engine("rheo", max_batch=2)
    first = [result.token_ids for result in engine.generate([request(str(n), n) for n in (5, 9, 2)])]
    again = [result.token_ids for result in engine.generate([request(str(n), n) for n in (5, 9, 2)])]
    assert first == again


def test_work_of_others_is_not_mixed_up(tiny):
    """While requests are submitted, or a stream is read, another call gets no results of theirs, and none of its own lost."""
    engine = tiny.engine("rheo", max_batch=2)
    engine.submit(request("mine", 3))
    for call in (engine.generate, engine.stream):
        with pytest.raises(RuntimeError, match="has work already"):
            call([request("yours")])
    results = []
    while engine.has_work:
        results += engine.step()
    assert [result.id for result in results] == ["mine"]
    first, second = engine.stream([request("a", 2), request("b", 9)]), engine.stream([request("c")])
    assert next(first).id == "a"
    with pytest.raises(RuntimeError, match="has work already"):
        next(second)
    assert [result.id for result in first] == ["b"]
    assert [result.id for result in engine.generate([request("d", 2)])] == ["d"]


def test_an_abandoned_stream_leaves_nothing_behind(tiny):
    engine = tiny.engine("rheo", max_batch=2)
    for _ in engine.stream([request("a", 2), request("b", 50), request("c", 50)]):
        break
    (result,) = engine.generate([request("b", 3)])
    assert len(result.token_ids) == 3


def test_seed_of_the_row_over_the_engines(tiny):
    def tokens(engine_seed: int, row_seed: int | None) -> list[int]:
        (result,) = tiny.engine("rheo", seed=engine_seed).generate([Request(id="a", token_ids=[5, 6], params=params(12, seed=row_seed))])
        assert result.seed == (engine_seed if row_seed is None else row_seed)
        return result.token_ids

    assert tokens(1, 7) == tokens(2, 7) == tokens(7, None)
    assert tokens(1, None) != tokens(2, None)
    assert tokens(7, 0) == tokens(0, None) != tokens(7, None), "0 is a seed"


def test_samples_of_a_row_differ(tiny):
    results = tiny.engine("rheo").generate([request("a", 12, sample=sample) for sample in range(4)])
    assert [(result.id, result.sample) for result in results] == [("a", sample) for sample in range(4)]
    assert len({tuple(result.token_ids) for result in results}) == 4


def test_a_result_says_what_was_asked(tiny):
    engine = tiny.engine("off")
    raw, chat, ids = engine.generate(
        [
            Request(prompt="w3 w4", params=params(2)),
            Request(messages=[{"role": "user", "content": "w5 w6"}], params=params(2)),
            Request(token_ids=[3, 4], params=params(2)),
        ]
    )
    assert (raw.prompt, raw.num_prompt_tokens, raw.finish_reason, raw.error) == ("w3 w4", 2, "length", None)
    assert (chat.prompt, chat.num_prompt_tokens) == ("<s> w5 w6 </s> w3", 5)
    assert (ids.prompt, ids.num_prompt_tokens) == ("w3 w4", 2)
    assert raw.text == " ".join(f"w{token}" for token in raw.token_ids if token > 2) or min(raw.token_ids) < 3
    assert raw.latency_s > 0 and raw.logprobs is None
    (default,) = engine.generate([Request(token_ids=[3])])
    assert default.finish_reason in ("stop", "length") and len(default.token_ids) <= 256


# --- bad rows -----------------------------------------------------------------------------------------------------------------------

BAD_ROWS = [
    ({}, "bad_request", "exactly one of prompt, messages, token_ids"),
    ({"prompt": "w3", "token_ids": [3]}, "bad_request", "prompt and token_ids"),
    ({"prompt": "w3", "messages": [{"role": "user", "content": "w3"}]}, "bad_request", "prompt and messages"),
    ({"prompt": ""}, "empty_prompt", "no tokens"),
    ({"prompt": "   "}, "empty_prompt", "no tokens"),
    ({"token_ids": []}, "empty_prompt", "no tokens"),
    ({"prompt": 5}, "bad_request", "prompt is a int"),
    ({"prompt": "w3 \ud800"}, "bad_request", "not valid Unicode"),
    ({"token_ids": [3, VOCAB]}, "bad_request", f"[{VOCAB}]; allowed: integers from 0 to {VOCAB - 1}"),
    ({"token_ids": [-1]}, "bad_request", "[-1]"),
    ({"token_ids": ["3"]}, "bad_request", "['3']"),
    ({"token_ids": [True]}, "bad_request", "[True]"),
    ({"token_ids": 5}, "bad_request", "token_ids is a int; allowed: a list of integers"),
    ({"token_ids": "345"}, "bad_request", "token_ids is a str"),
    ({"token_ids": [3] * 60}, "prompt_too_long", "60 tokens; allowed: 59"),
    ({"prompt": "w3 " * 500}, "prompt_too_long", "500 tokens"),
    ({"messages": []}, "template_error", "at least one entry"),
    ({"messages": "hello"}, "template_error", "'hello'"),
    ({"messages": ["hello"]}, "template_error", "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "w3"}]}, "template_error", "'wizard'"),
    ({"messages": [{"role": "user"}]}, "template_error", "messages[0].content is None"),
    ({"token_ids": [3], "params": SamplingParams(top_p=2.0)}, "bad_params", "top_p=2.0"),
    ({"token_ids": [3], "params": SamplingParams(stop_token_ids=[VOCAB])}, "bad_params", f"0 to {VOCAB - 1}"),
    ({"token_ids": [3], "params": SamplingParams(seed="x")}, "bad_params", "seed='x'"),
    ({"token_ids": [3], "params": {"temperature": 1.0}}, "bad_params", "params is a dict; allowed: SamplingParams"),
]


@pytest.mark.parametrize("method", ["rheo", "coupled"])
def test_bad_rows_come_back_typed_and_alone(tiny, method):
    """Between all bad rows stand good ones; these get the tokens that they get without them."""
    good = [request(f"good {index}", 4 + index % 5) for index in range(len(BAD_ROWS))]
    requests = []
    for index, ((fields, _, _), neighbour) in enumerate(zip(BAD_ROWS, good, strict=True)):
        requests += [neighbour, Request(id=f"bad {index}", **fields)]
    results = tiny.engine(method, max_batch=3, max_model_len=60, seed=4).generate(requests)
    for (fields, error_type, words), result in zip(BAD_ROWS, results[1::2], strict=True):
        assert isinstance(result.error, RowError), fields
        assert (result.error.type, result.finish_reason) == (error_type, "error"), fields
        assert words in result.error.message, fields
        assert (result.token_ids, result.text, result.cycles, result.logprobs) == (None, None, None, None)
        assert result.prompt == fields.get("prompt") and isinstance(result.seed, int)
    alone = tiny.engine(method, max_batch=3, max_model_len=60, seed=4).generate(good)
    assert [result.token_ids for result in results[::2]] == [result.token_ids for result in alone]


def test_a_bad_row_takes_no_slot(tiny):
    engine = tiny.engine("off", max_batch=1)
    engine.submit(request("running", 5))
    engine.step()
    engine.submit(Request(id="bad"))
    (result,) = engine.step()
    assert result.id == "bad" and engine.num_running == 1


def test_messages_without_a_template(tiny, make_clock):
    clock = make_clock([3, 4, 5])
    assert tiny.engine("off").has_chat_template and not clock.engine("off").has_chat_template
    (result,) = clock.engine("off").generate([Request(messages=[{"role": "user", "content": "a"}])])
    assert result.error.type == "template_error" and "no chat template" in result.error.message


def test_without_a_tokenizer_only_token_ids(tiny):
    engine = tiny.engine("off", tokenizer=None)
    bad, good = engine.generate([Request(prompt="w3"), request("good", 3)])
    assert bad.error.type == "bad_request" and "token_ids" in bad.error.message
    assert len(good.token_ids) == 3


# --- limits -------------------------------------------------------------------------------------------------------------------------


def cache_gib(tiny: Tiny, method: str, num_places: int) -> float:
    return num_places * tiny.engine(method).decoder.bytes_per_token / 2**30


@pytest.mark.parametrize("method", ["off", "rheo"])
def test_a_row_that_can_never_fit(tiny, method):
    """128 places: the long row needs more; the others wait for room, and all of them end."""
    engine = tiny.engine(method, max_batch=8, kv_cache_gib=cache_gib(tiny, method, 128))
    requests = [request("short 0", 20), request("long", 200), *(request(f"short {n}", 20) for n in range(1, 9))]
    results = engine.generate(requests)
    assert [result.id for result in results if result.error] == ["long"]
    assert results[1].error.type == "out_of_memory" and "engine.kv_cache_gib" in results[1].error.message
    assert all(len(result.token_ids) == 20 for result in results if not result.error)
    if method == "off":
        sizes = {cycle.batch_size for result in results if result.cycles for cycle in result.cycles}
        assert max(sizes) == 2 // count_pages(3 + 20 + 1), "as many rows as fit run together"


def test_the_caches_stay_within_their_limit(tiny):
    """A long row, then many short ones."""
    num_places = 256
    engine = tiny.engine("off", max_batch=8, kv_cache_gib=cache_gib(tiny, "off", num_places))
    for each in [request("long", 200), *(request(str(n), 4) for n in range(12))]:
        engine.submit(each)
    while engine.has_work:
        engine.step()
        cache = engine.decoder.cache
        assert cache.key.nbytes + cache.value.nbytes <= num_places * engine.decoder.bytes_per_token


def test_the_models_length_bounds_rows_and_prompts(tiny):
    engine = tiny.engine("rheo", max_model_len=20)
    results = engine.generate([request("a", 100, [5] * 19), request("b", 100, [5] * 20), request("c", 100, [5] * 12)])
    assert [len(result.token_ids) if result.token_ids else result.error.type for result in results] == [1, "prompt_too_long", 8]
    with pytest.raises(UserError) as caught:
        tiny.engine("rheo", max_model_len=513)
    assert "513" in str(caught.value) and "512" in str(caught.value)


def test_the_whole_length_of_the_model_can_be_used(tiny):
    (result,) = run(tiny.engine("rheo"), [[5 + index % 9 for index in range(490)]], params(100))
    assert len(result.token_ids) == 22 and result.finish_reason == "length"


def test_running_out_of_memory_is_the_engines_error(tiny, monkeypatch):
    engine = tiny.engine("rheo")
    engine.submit(request("a"))

    def fail(rows):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(engine.decoder, "run", fail)
    with pytest.raises(EngineError, match=r"out of memory with 1 rows; lower engine\.max_batch"):
        engine.step()


def test_submitted_requests_without_ids_are_numbered(tiny):
    engine = tiny.engine("rheo")
    for _ in range(3):
        engine.submit(request(None, 12))
    results = []
    while engine.has_work:
        results += engine.step()
    assert sorted(result.id for result in results) == ["0", "1", "2"]
    assert len({tuple(result.token_ids) for result in results}) == 3, "each row has its own randomness"


def test_stream_takes_up_bad_rows_as_slowly_as_good_ones(tiny):
    taken = []

    def requests():
        for n in range(1000):
            taken.append(n)
            yield Request(id=str(n), token_ids=[])

    stream = tiny.engine("off", max_batch=2).stream(requests())
    assert next(stream).error.type == "empty_prompt"
    assert len(taken) <= 4
    stream.close()


def test_a_sample_that_is_no_integer(tiny):
    results = tiny.engine("off").generate([Request(id="a", token_ids=[5], sample=[1]), request("b", 3)])
    assert results[0].error.type == "bad_request" and "sample=[1]" in results[0].error.message
    assert len(results[1].token_ids) == 3


def test_min_tokens_with_nothing_left_to_draw(tiny):
    values = SamplingParams(min_tokens=2, stop_token_ids=range(VOCAB))
    (result,) = tiny.engine("off").generate([Request(token_ids=[5], params=values)])
    assert result.error.type == "bad_params" and "min_tokens=2" in result.error.message


# --- loading ------------------------------------------------------------------------------------------------------------------------
