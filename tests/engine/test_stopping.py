"""Where rows end, and what is counted, kept and shown there (DESIGN.md section 6, FIELD-CASES B10, B11, B12)."""

from __future__ import annotations

import random

import pytest

from engine import Request, SamplingParams
from engine.row import Row
from engine.stopping import Cut, cut_tokens, final_text
from tests.engine.tiny_engines import CLOCK_SIZE, run, spelled

EOS = 2
A, B, C, AB, SPACE, HA, SPACE_HA = spelled("a", "b", "c", "ab", " ", "ha", " ha")
E_ACUTE = spelled(*(bytes([byte]) for byte in "é".encode()))
SMILE = spelled(*(bytes([byte]) for byte in "😀".encode()))
(E_ACUTE_X,) = spelled("éx")
DOT, END, THE, N = spelled(".", "END", "the", "n")
METHODS = ("rheo", "topk", "coupled", "chain", "off")
DEPTH = 4


@pytest.fixture(scope="module")
def tokenizer(make_clock):
    return make_clock([A]).tokenizer


def make_row(params: SamplingParams, output: list[int] | None = None) -> Row:
    stop_ids = [*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))]
    return Row(
        request=Request(id="x"),
        params=params,
        seed=0,
        key=0,
        prompt=None,
        tokens=[A, *(output or [])],
        num_prompt_tokens=1,
        max_tokens=params.max_tokens,
        stop_ids=frozenset(stop_ids),
        started=0.0,
    )


@pytest.mark.parametrize(
    "params, output, tokens, num_accepted, kept, accepted, reason",
    [
        ({}, [], [A, B, C], 2, 3, 2, None),
        ({}, [], [A, B, EOS], 2, 3, 2, "stop"),  # EOS is the bonus: it was not drafted
        ({}, [], [A, EOS, C], 2, 2, 2, "stop"),
        ({}, [], [EOS, B, C], 2, 1, 1, "stop"),
        ({}, [], [A, B, EOS, B, C, AB], 5, 3, 3, "stop"),  # the case of FIELD-CASES B12
        ({}, [], [EOS, EOS, EOS], 2, 1, 1, "stop"),
        ({"ignore_eos": True}, [], [A, EOS, C], 2, 3, 2, None),
        ({"ignore_eos": True, "stop_token_ids": [EOS]}, [], [A, EOS, C], 2, 2, 2, "stop"),
        ({"stop_token_ids": [C, B]}, [], [A, B, C], 2, 2, 2, "stop"),
        ({"stop_token_ids": [C]}, [], [A, EOS, C], 2, 2, 2, "stop"),
        # max_tokens: accepted is counted before that cut
        ({"max_tokens": 2}, [], [A, B, C], 2, 2, 2, "length"),
        ({"max_tokens": 3}, [], [A, B, C], 2, 3, 2, "length"),
        ({"max_tokens": 4}, [A, B, C], [A, B, C, A], 3, 1, 3, "length"),
        ({"max_tokens": 2}, [], [A, EOS, C], 2, 2, 2, "stop"),  # EOS exactly there
        ({"max_tokens": 2}, [], [A, B, EOS, C], 3, 2, 3, "length"),  # EOS behind it
        ({"max_tokens": 1}, [], [EOS, B], 1, 1, 1, "stop"),
        # stop strings
        ({"stop": ["b"]}, [], [A, B, C], 2, 2, 2, "stop"),
        ({"stop": ["b"]}, [], [A, AB, C], 2, 2, 2, "stop"),
        ({"stop": ["abc"]}, [A, B], [C, A], 1, 1, 1, "stop"),
        ({"stop": ["abc"]}, [], [A, B, C, A], 3, 3, 3, "stop"),
        ({"stop": ["ba"]}, [B], [AB, C], 1, 1, 1, "stop"),
        ({"stop": ["c", "b"]}, [], [A, B, C], 2, 2, 2, "stop"),
        ({"stop": [" ha ha ha"]}, [SPACE_HA], [SPACE_HA, SPACE, HA, A, B], 4, 3, 3, "stop"),
        ({"stop": ["é"]}, [E_ACUTE[0]], [E_ACUTE[1], A], 1, 1, 1, "stop"),
        ({"stop": ["é"]}, [], [A, E_ACUTE[0], A, E_ACUTE[1]], 3, 4, 3, None),
        ({"stop": ["😀"]}, SMILE[:2], [SMILE[2], SMILE[3], A], 2, 2, 2, "stop"),
        ({"stop": ["éx"]}, [], [A, E_ACUTE_X, B], 2, 2, 2, "stop"),
        ({"stop": ["é"]}, [], [A, E_ACUTE_X, B], 2, 2, 2, "stop"),
        ({"stop": ["b"], "max_tokens": 2}, [], [A, B, C], 2, 2, 2, "stop"),
        ({"stop": ["c"], "max_tokens": 2}, [], [A, B, C], 2, 2, 2, "length"),
        ({"stop": ["c"]}, [], [A, EOS, C], 2, 2, 2, "stop"),
        ({"stop": ["a"]}, [], [A, EOS, C], 2, 1, 1, "stop"),
        ({"stop": ["ab"]}, [], [B, C], 1, 2, 1, None),  # the prompt's own "a" is no part of it
        ({"stop": ["ac"], "ignore_eos": True}, [A], [EOS, C, B], 2, 2, 2, "stop"),  # special tokens are no text
        # min_tokens
        ({"stop": ["a"], "min_tokens": 3}, [], [A, B, C, B], 3, 4, 3, None),  # completed before: not looked for again
        ({"stop": ["c"], "min_tokens": 3}, [], [A, B, C, B], 3, 3, 3, "stop"),
        ({"stop": ["c"], "min_tokens": 4}, [A], [A, B, C, B], 3, 3, 3, "stop"),
        ({"stop": ["c", "b"], "min_tokens": 3}, [], [A, C, B, C], 3, 3, 3, "stop"),
    ],
)
def test_cut(tokenizer, params, output, tokens, num_accepted, kept, accepted, reason):
    row = make_row(SamplingParams(**params), output)
    expected = Cut(kept=tokens[:kept], accepted=accepted, finish_reason=reason)
    assert cut_tokens(row, tokens, num_accepted, tokenizer) == expected


@pytest.mark.parametrize("stop", [["ab"], ["é"], ["😀", "ha ha"], ["c", "abc", "b"], [" ", "."], ["the END"], ["aaaaaaaa"]])
def test_no_chunking_moves_a_stop_string(tokenizer, stop):
    """Random tokens in random chunks end where the text first holds a stop string, and the text ends before it."""
    chance = random.Random(str(stop))
    pieces = [A, A, A, B, C, AB, SPACE, HA, *E_ACUTE, *SMILE, E_ACUTE_X, DOT, END, THE, EOS]
    for _ in range(60):
        output = []
        while len(output) < 60:
            output += chance.choice([SMILE, E_ACUTE, [chance.choice(pieces)], [THE, SPACE, END], [HA, SPACE], [A] * 4])
        end, text = None, tokenizer.decode(output, skip_special_tokens=True)
        for count in range(1, len(output) + 1):
            so_far = tokenizer.decode(output[:count], skip_special_tokens=True)
            places = [so_far.find(string) for string in stop if string in so_far]
            if places:
                end, text = count, so_far[: min(places)]
                break
        row = make_row(SamplingParams(stop=stop, ignore_eos=True, max_tokens=len(output)))
        while row.finish_reason is None:
            chunk = output[row.num_output_tokens :][: chance.randint(1, 7)]
            cut = cut_tokens(row, chunk, len(chunk) - 1, tokenizer)
            row.tokens += cut.kept
            row.finish_reason = cut.finish_reason
        assert row.output == output[:end]
        assert row.finish_reason == ("stop" if end else "length")
        assert final_text(row, tokenizer) == text


def test_a_stop_string_after_a_long_text(tokenizer):
    """Only the tail of the text is decoded; it reaches over a long stop string of many tokens."""
    stop = "the" + "n" * 30
    row = make_row(SamplingParams(stop=[stop], max_tokens=1000), [N] * 300 + [THE] + [N] * 27)
    cut = cut_tokens(row, [N] * 6, 5, tokenizer)
    assert cut == Cut(kept=[N] * 3, accepted=3, finish_reason="stop")
    row.tokens += cut.kept
    row.finish_reason = "stop"
    assert final_text(row, tokenizer) == "n" * 300


def test_a_stop_string_across_tokens_without_text(tokenizer):
    """However many: special tokens under ignore_eos, and ids that only the model's padding has."""
    for hidden in ([EOS] * 40, [EOS, CLOCK_SIZE + 5] * 300):
        row = make_row(SamplingParams(stop=["ab"], ignore_eos=True, max_tokens=1000), [C, A, *hidden])
        cut = cut_tokens(row, [EOS, B, C], 2, tokenizer)
        assert cut == Cut(kept=[EOS, B], accepted=2, finish_reason="stop")
        row.tokens += cut.kept
        row.finish_reason = "stop"
        assert final_text(row, tokenizer) == "c"


#: a text without a token twice; an end can be put anywhere in it
TEXT = [A, B, THE, C, DOT, AB, HA, N, END, SPACE_HA]


def expected_cycles(num_output: int, ends_by_stop: bool, method: str) -> list[tuple[int, int]]:
    """(accepted, emitted) of each cycle when all drafts are right and the row ends with output token `num_output`."""
    depth = 0 if method == "off" else DEPTH
    cycles, left = [], num_output - 1  # the first token is the prefill's
    while left:
        emitted = min(left, depth + 1)
        is_last_of_stop = ends_by_stop and emitted == left
        cycles.append((min(depth, emitted) if is_last_of_stop else depth, emitted))
        left -= emitted
    return cycles


def generate_clock(clock, method: str, params: SamplingParams):
    (result,) = run(clock.engine(method, tree_size=8, depth=DEPTH, top_k=3), [[0]], params)
    assert len(result.token_ids) == 1 + sum(cycle.emitted for cycle in result.cycles)
    assert result.logprobs is None or len(result.logprobs) == len(result.token_ids)
    return result


@pytest.mark.parametrize("method", METHODS)
def test_eos_at_each_depth(make_clock, method):
    for place in range(len(TEXT)):
        text = [*TEXT[:place], EOS, *TEXT[place:]]
        params = SamplingParams(temperature=0.0, max_tokens=30, logprobs=True)
        result = generate_clock(make_clock(text), method, params)
        assert (result.token_ids, result.finish_reason) == (text[: place + 1], "stop")
        assert [(cycle.accepted, cycle.emitted) for cycle in result.cycles] == expected_cycles(place + 1, True, method)
        assert result.text == make_clock(text).tokenizer.decode(text[:place])


@pytest.mark.parametrize("method", METHODS)
def test_max_tokens_at_each_depth(make_clock, method):
    clock = make_clock([*TEXT, EOS])
    for max_tokens in range(1, len(TEXT) + 2):
        result = generate_clock(clock, method, SamplingParams(temperature=0.0, max_tokens=max_tokens))
        by_stop = max_tokens == len(TEXT) + 1  # EOS is the last token that max_tokens allows
        assert result.token_ids == [*TEXT, EOS][:max_tokens]
        assert result.finish_reason == ("stop" if by_stop else "length")
        cycles = [(cycle.accepted, cycle.emitted) for cycle in result.cycles]
        expected = expected_cycles(max_tokens, by_stop, method)
        if not by_stop and cycles and len(TEXT) + 1 < 1 + sum(accepted + 1 for accepted, _ in expected):
            # the path went on behind max_tokens up to EOS, where accepted ends
            expected[-1] = (len(TEXT) + 1 - sum(emitted for _, emitted in expected[:-1]) - 1, expected[-1][1])
        assert cycles == expected


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "stop, num_output, text",
    [
        (["b"], 2, "a"),
        (["he"], 3, "abt"),
        (["thec."], 5, "ab"),
        (["abha"], 7, "abthec."),
        (["haha", "aE", "ND"], 9, "abthec.abhanE"),
        (["bt", "abthe"], 3, ""),
    ],
)
def test_stop_strings(make_clock, method, stop, num_output, text):
    """In the middle of a chunk, inside a token, across tokens and across cycles; of several, the one that begins first is cut off."""
    result = generate_clock(make_clock([*TEXT, EOS]), method, SamplingParams(temperature=0.0, stop=stop, logprobs=True, max_tokens=30))
    assert (result.token_ids, result.finish_reason, result.text) == (TEXT[:num_output], "stop", text)
    assert [(cycle.accepted, cycle.emitted) for cycle in result.cycles] == expected_cycles(num_output, True, method)


@pytest.mark.parametrize("method", ["rheo", "off"])
@pytest.mark.parametrize(
    "text, stop, num_output, shown",
    [
        ([A, *SMILE, B, EOS], "😀", 5, "a"),
        ([A, B, THE, *E_ACUTE, C, EOS], "é", 5, "abthe"),
        ([A, B, *SMILE, *E_ACUTE, C, EOS], "😀é", 8, "ab"),
        ([A, B, *SMILE, E_ACUTE_X, C, EOS], "é", 7, "ab😀"),
        ([A, B, *SMILE, C, EOS], "never", 8, "ab😀c"),
    ],
)
def test_stop_strings_of_several_bytes(make_clock, method, text, stop, num_output, shown):
    result = generate_clock(make_clock(text), method, SamplingParams(temperature=0.0, stop=[stop], max_tokens=30))
    assert (result.token_ids, result.finish_reason, result.text) == (text[:num_output], "stop", shown)


@pytest.mark.parametrize("method", METHODS)
def test_stop_ids_are_not_shown(make_clock, method):
    result = generate_clock(make_clock([*TEXT, EOS]), method, SamplingParams(temperature=0.0, stop_token_ids=[C, HA], max_tokens=30))
    assert (result.token_ids, result.finish_reason, result.text) == ([A, B, THE, C], "stop", "abthe")


@pytest.mark.parametrize("method", METHODS)
def test_ignore_eos(make_clock, method):
    """EOS is an ordinary token, but never text."""
    text = [A, B, EOS, C, DOT, THE]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=6)
    result = generate_clock(make_clock(text), method, params)
    assert (result.token_ids, result.finish_reason, result.text) == (text, "length", "abc.the")


@pytest.mark.parametrize("method", METHODS)
def test_min_tokens_masks_eos_and_stop_ids(make_clock, method):
    """Where a stop may not come, the lowest id is the likeliest of the rest: token 0, after which the clock starts again."""
    text = [A, B, C, EOS, DOT]
    for min_tokens, tokens in (
        (3, [A, B, C, EOS]),  # three tokens stand before EOS
        (4, [A, B, C, 0, A, B, C, EOS]),
        (8, [A, B, C, 0, A, B, C, 0, A, B, C, EOS]),
    ):
        params = SamplingParams(temperature=0.0, min_tokens=min_tokens, max_tokens=20)
        result = generate_clock(make_clock(text), method, params)
        assert (result.token_ids, result.finish_reason) == (tokens, "stop"), min_tokens
    params = SamplingParams(temperature=0.0, min_tokens=2, max_tokens=20, stop_token_ids=[C, B])
    assert generate_clock(make_clock(text), method, params).token_ids == [A, 0, A, B]


@pytest.mark.parametrize("method", METHODS)
def test_min_tokens_delays_stop_strings(make_clock, method):
    params = SamplingParams(temperature=0.0, min_tokens=4, max_tokens=30, stop=["b", "the", "n"])
    result = generate_clock(make_clock([*TEXT, EOS]), method, params)
    assert (result.token_ids, result.finish_reason, result.text) == (TEXT[:6], "stop", "abthec.a")


def test_the_models_length_ends_a_row(make_clock):
    clock = make_clock([*TEXT, EOS])
    (result,) = run(clock.engine("rheo", max_model_len=9), [[1, 1, 0]], SamplingParams(temperature=0.0, max_tokens=500))
    assert (result.token_ids, result.finish_reason) == (TEXT[:6], "length")


def test_a_character_cut_by_max_tokens(make_clock):
    result = generate_clock(make_clock([A, *SMILE, B]), "rheo", SamplingParams(temperature=0.0, max_tokens=3))
    assert result.text.startswith("a") and len(result.token_ids) == 3 and result.finish_reason == "length"


def test_without_a_tokenizer_rows_end_by_ids(make_clock):
    clock = make_clock([*TEXT, EOS])
    (result,) = run(clock.engine("rheo", tokenizer=None), [[0]], SamplingParams(temperature=0.0, max_tokens=50))
    assert (result.token_ids, result.text, result.prompt) == ([*TEXT, EOS], "", None)


def test_the_clock_is_sampled_too(make_clock):
    """At T = 1 tokens leave the clock's path now and then; the counts hold all the same."""
    clock = make_clock([*TEXT, EOS])
    clock_params = SamplingParams(max_tokens=40, temperature=3.0)
    results = run(clock.engine("rheo", tree_size=8, depth=DEPTH, top_k=3), [[0]] * 6, clock_params)
    assert len({tuple(result.token_ids) for result in results}) > 1
    for result in results:
        assert len(result.token_ids) == 1 + sum(cycle.emitted for cycle in result.cycles)
        assert EOS not in result.token_ids[:-1] and max(result.token_ids) < CLOCK_SIZE
        assert (result.finish_reason == "stop") == (result.token_ids[-1] == EOS)
