"""Prompts that do not fit: refused, or cut."""

from __future__ import annotations

import pytest

from engine.errors import RowError
from engine.truncation import cut_texts
from tests.engine.chat_prompts import chat, prepare, refusal, templated, user
from tests.engine.chat_tokenizers import llama3, qwen3
from tests.engine.test_encoding import FAMILIES, special_ids

NUMBERS = " ".join(str(number) for number in range(400))


def test_a_prompt_that_fits_is_not_cut():
    tokenizer = llama3()
    full = prepare(tokenizer, prompt=NUMBERS)
    length = len(full.tokens)
    for side in ("error", "left", "right"):
        row = prepare(tokenizer, prompt=NUMBERS, truncate=side, max_model_len=length + 100, max_tokens=100)
        assert (row.tokens, row.max_tokens) == (full.tokens, 100)
        # max_tokens would fill the model alone, so that no cut makes room for them
        row = prepare(tokenizer, prompt=NUMBERS, truncate=side, max_model_len=length + 1, max_tokens=length + 1)
        assert (row.tokens, row.max_tokens) == (full.tokens, 1)
    row = prepare(tokenizer, prompt=NUMBERS, max_model_len=length + 1, max_tokens=100)
    assert (row.tokens, row.max_tokens) == (full.tokens, 1)
    error = refusal(tokenizer, prompt=NUMBERS, max_model_len=len(full.tokens))
    assert error.type == "prompt_too_long"
    assert error.message == f"the prompt has {len(full.tokens)} tokens; allowed: {len(full.tokens) - 1} (max_model_len - 1)"


@pytest.mark.parametrize("side", ["left", "right"])
def test_every_prompt_is_cut_that_leaves_too_little_room(side):
    """No step at max_model_len: a prompt that just fits the model gets as much room as one that does not."""
    for length, kept in ((47, 47), (48, 48), (49, 48), (63, 48), (64, 48), (65, 48), (500, 48)):
        row = prepare(qwen3(), token_ids=[5] * length, truncate=side, max_model_len=64, max_tokens=16)
        assert (len(row.tokens), row.max_tokens) == (kept, 16)


@pytest.mark.parametrize(("side", "kept"), [("left", [16, 17, 18]), ("right", [10, 11, 12])])
def test_token_ids_are_cut(side, kept):
    row = prepare(qwen3(), token_ids=list(range(10, 19)), truncate=side, max_model_len=9, max_tokens=6)
    assert (row.tokens, row.num_prompt_tokens, row.max_tokens) == (kept, 3, 6)
    assert row.prompt == qwen3().decode(kept)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_raw_text_is_cut_at_tokens_and_keeps_its_bos(family, side):
    tokenizer = FAMILIES[family]()
    row = prepare(tokenizer, prompt=NUMBERS, truncate=side, max_model_len=100, max_tokens=40)
    assert len(row.tokens) in (59, 60) and row.max_tokens == 40
    assert row.tokens == tokenizer(row.prompt)["input_ids"]
    assert NUMBERS.endswith(row.prompt) if side == "left" else NUMBERS.startswith(row.prompt)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cut_leaves_no_blank_that_belonged_to_the_next_word(family):
    """Llama 3 counts the blank to neither word, and Vicuna to the next one."""
    tokenizer = FAMILIES[family]()
    row = prepare(tokenizer, prompt="the river hello " * 50, truncate="right", max_model_len=100, max_tokens=40)
    assert len(row.tokens) == 60
    assert row.prompt.split(" ")[-1] in ("the", "river", "hello")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_of_messages_the_longest_text_is_cut(family, side):
    tokenizer = FAMILIES[family]()
    whole = chat("say hello", "the river", "the end", NUMBERS)
    row = prepare(tokenizer, messages=whole, truncate=side, max_model_len=300, max_tokens=100)
    assert 195 <= len(row.tokens) <= 200
    before, after = templated(tokenizer, chat("say hello", "the river", "the end", "###"))[0].split("###")
    assert row.prompt.startswith(before) and row.prompt.endswith(after)
    kept = row.prompt.removeprefix(before).removesuffix(after)
    assert kept and (NUMBERS.endswith(kept) if side == "left" else NUMBERS.startswith(kept))
    assert row.tokens == templated(tokenizer, chat("say hello", "the river", "the end", kept))[1]


def test_texts_that_are_alike_are_cut_alike():
    tokenizer = qwen3()
    row = prepare(tokenizer, messages=chat("0" * 90, "1" * 100, "2" * 5, "3" * 80), truncate="right", max_model_len=200, max_tokens=20)
    assert [row.prompt.count(digit) for digit in "0123"] == [45, 45, 5, 45]
    assert 180 - 2 <= len(row.tokens) <= 180  # one token more would be one of each of three texts


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_cut_goes_through_no_character(family, side):
    tokenizer = FAMILIES[family]()
    for max_model_len in range(42, 58):
        row = prepare(tokenizer, prompt="😀é" * 40, truncate=side, max_model_len=max_model_len, max_tokens=max_model_len - 32)
        assert set(row.prompt) == {"😀", "é"} and "\ufffd" not in tokenizer.decode(row.tokens)
        assert 32 - 5 <= len(row.tokens) <= 32


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_cut_parts_no_accent_from_its_letter(side):
    """The normalizer joins the two, and the tokens' places hold the letter only."""
    row = prepare(qwen3(), prompt="e\u0301" * 40, truncate=side, max_model_len=60, max_tokens=40)
    assert row.prompt == "e\u0301" * 10


def test_special_tokens_in_text_that_is_cut_stay_text():
    tokenizer = qwen3()
    row = prepare(tokenizer, messages=user("<|im_end|> " * 200), truncate="left", max_model_len=200, max_tokens=50)
    assert sum(token in special_ids(tokenizer) for token in row.tokens) == 3
    assert 148 <= len(row.tokens) <= 150
    parsed = prepare(tokenizer, messages=user("<|im_end|> " * 200), truncate="left", max_model_len=200, max_tokens=50, parse_special=True)
    assert sum(token in special_ids(tokenizer) for token in parsed.tokens) > 60


TOO_LONG = [
    ({"prompt": NUMBERS, "max_tokens": 100}, "and max_tokens=100 leaves no room for it; allowed: below 100"),
    ({"token_ids": [5] * 100, "max_tokens": 200}, "the prompt has 100 tokens, and max_tokens=200 leaves no room"),
    ({"messages": user(NUMBERS), "max_tokens": 90}, "no text would be left of it in 10 (max_model_len - max_tokens)"),
    ({"messages": [{"role": "assistant", "tool_calls": [NUMBERS]}], "max_tokens": 10}, "no text would be left of it in 90"),
    ({"prompt": "😀" * 100, "max_tokens": 99}, "no text would be left of it in 1 "),
    ({"prompt": NUMBERS, "truncate": "error"}, "tokens; allowed: 99 (max_model_len - 1)"),
]


@pytest.mark.parametrize(("fields", "words"), TOO_LONG, ids=range(len(TOO_LONG)))
def test_prompts_that_cannot_be_cut_to_fit(fields, words):
    error = refusal(qwen3(), **{"truncate": "left", "max_model_len": 100} | fields)
    assert error.type == "prompt_too_long"
    assert words in error.message


@pytest.mark.parametrize("num_over", [1, 7, 6000])
def test_cutting_texts_that_the_template_drops_ends_soon(num_over):
    num_encoded = 0

    def encode(texts: list[str]) -> tuple[str, list[int]]:
        nonlocal num_encoded
        num_encoded += 1
        return "", [0] * (100 + num_over)

    text = "a" * 5000
    spans = [(place, place + 1) for place in range(len(text))]
    with pytest.raises(RowError, match=r"prompt_too_long: .* no text would be left"):
        cut_texts([text, "", text], [spans, [], spans], side="left", num_tokens=100 + num_over, num_allowed=100, encode=encode)
    assert num_encoded <= 13  # 2 ** 13 > 5000
