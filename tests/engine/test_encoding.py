"""Text to token ids: one BOS at most, and special tokens that user text spells stay text."""

from __future__ import annotations

import itertools
import random

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers
from transformers import PreTrainedTokenizerFast

from engine.encoding import choose_mark, encode_text, mark_special, token_spans, unmark
from engine.errors import RowError
from engine.models.loading import load_tokenizer
from tests.engine.chat_tokenizers import llama3, qwen3, vicuna
from tests.tiny_models import tiny_llama

FAMILIES = {"llama3": llama3, "qwen3": qwen3, "vicuna": vicuna}

#: whole and broken special tokens of all families, and what stands next to them
PIECES = [
    *("<|begin_of_text|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<think>", "<", "<|", "|>", "im_end", "/s>", "s"),
    *(" ", "  ", "\n", "the", " hello", "text.", "é", "e\u0301", "😀", "\u202e", "\0", "\U00100000", "\U00100001", "\ue000", "0", "2"),
]


def random_texts(num: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices(PIECES, k=draw.randint(0, 9))) for _ in range(num)]


def encode_raw(tokenizer, text: str, *, templated: bool = False) -> list[int]:
    """User text alone."""
    mark = choose_mark(tokenizer, text)
    return encode_text(tokenizer, mark_special(tokenizer, text, mark), templated=templated, mark=mark)


def special_ids(tokenizer) -> set[int]:
    return {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}


@pytest.mark.parametrize("family", FAMILIES)
def test_user_text_is_encoded_as_by_a_tokenizer_that_has_no_such_special_tokens(family):
    tokenizer, twin = FAMILIES[family](), FAMILIES[family](twin=True)
    num_spelled = 0
    for text in random_texts(300):
        token_ids = encode_raw(tokenizer, text)
        assert token_ids == twin(text)["input_ids"], text
        assert special_ids(tokenizer).isdisjoint(encode_raw(tokenizer, text, templated=True)), text
        num_spelled += token_ids != tokenizer(text)["input_ids"]
    assert num_spelled > 50


@pytest.mark.parametrize("spaces", ["first", "always", "never", "normalizer"])
@pytest.mark.parametrize("rule", [{}, {"lstrip": True}, {"rstrip": True}, {"lstrip": True, "rstrip": True}], ids=str)
def test_special_tokens_of_the_template_keep_their_ways_with_spaces(spaces, rule):
    """Template and user text alternate; the twin's template has its own special tokens, and user text has the usual ones."""
    tokenizer, twin = vicuna(spaces=spaces, **rule), vicuna(twin=True, spaces=spaces, **rule)
    twin_of = {"<s>": twin.bos_token, "</s>": twin.eos_token}
    draw = random.Random(1)
    for first, second in itertools.pairwise(random_texts(60, seed=2)):
        mark = choose_mark(tokenizer, first, second)
        between = draw.choice([" ", "", "\n"]) + draw.choice(["<s>", "</s>", "</s><s>", "the"]) + draw.choice([" ", "", "the"])
        marked = f"<s>{mark_special(tokenizer, first, mark)}{between}{mark_special(tokenizer, second, mark)}</s>"
        assert unmark(marked, mark) == f"<s>{first}{between}{second}</s>"
        for name, twin_name in twin_of.items():
            between = between.replace(name, twin_name)
        expected = twin(f"{twin.bos_token}{first}{between}{second}{twin.eos_token}", add_special_tokens=False)["input_ids"]
        assert encode_text(tokenizer, marked, templated=True, mark=mark) == expected, (first, between, second)


@pytest.mark.parametrize("rule", ["normalized", "single_word"])
@pytest.mark.parametrize("spaces", ["first", "normalizer"])
def test_a_template_s_token_is_special_whatever_stands_beside_it(spaces, rule):
    """The ordinary tokenizer misses some: a normalizer makes "▁</s>" of </s>, and a single word has blanks around it."""
    tokenizer = vicuna(spaces=spaces, **{rule: True})
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    mark = choose_mark(tokenizer, "")
    token_ids = encode_text(tokenizer, f"<s>the{mark_special(tokenizer, '</s>', mark)}text</s>", templated=True, mark=mark)
    assert [token for token in token_ids if token in (bos, eos)] == [bos, eos]
    assert (token_ids[0], token_ids[-1]) == (bos, eos)


def test_text_that_a_normalizer_makes_into_a_special_token():
    tokenizer = Tokenizer(models.BPE({symbol: id for id, symbol in enumerate("<>s")}, []))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.add_special_tokens([AddedToken("<s>", normalized=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
    assert tokenizer("＜s＞")["input_ids"] == [3]
    assert encode_raw(tokenizer, "＜s＞") == [0, 2, 1]


BOS = [
    # family, raw text, parse_special, number of BOS, by the tokenizer's rule or as text
    ("llama3", "hello", False, 1),
    ("llama3", "", False, 1),
    ("llama3", "<|begin_of_text|>hello", False, 1),
    ("llama3", "<|begin_of_text|>hello", True, 1),
    ("llama3", "hello<|begin_of_text|>", True, 2),
    ("vicuna", "hello", False, 1),
    ("vicuna", "<s> hello", False, 1),
    ("vicuna", "<s> hello", True, 1),
    ("qwen3", "hello", False, 0),
    ("qwen3", "hello", True, 0),
]


@pytest.mark.parametrize(("family", "text", "parse_special", "num_bos"), BOS)
def test_bos_of_raw_text(family, text, parse_special, num_bos):
    tokenizer = FAMILIES[family]()
    token_ids = encode_text(tokenizer, text, templated=False) if parse_special else encode_raw(tokenizer, text)
    assert token_ids.count(tokenizer.bos_token_id) == num_bos
    assert not num_bos or token_ids[0] == tokenizer.bos_token_id
    if not parse_special:
        assert tokenizer.decode(token_ids[num_bos:]).removeprefix(" ") == text


@pytest.mark.parametrize("family", FAMILIES)
def test_templated_text_gets_no_bos(family):
    tokenizer = FAMILIES[family]()
    assert encode_text(tokenizer, "hello", templated=True) == tokenizer("hello", add_special_tokens=False)["input_ids"]


def test_a_mark_that_the_template_parted_from_its_token_goes_away():
    tokenizer = vicuna()
    mark = choose_mark(tokenizer, "")
    expected = tokenizer("<s>the text", add_special_tokens=False)["input_ids"]
    assert encode_text(tokenizer, f"<s>the{mark} text", templated=True, mark=mark) == expected


def test_marks_are_characters_that_the_text_does_not_have():
    tokenizer = vicuna()
    plane = "".join(map(chr, range(0x100000, 0x10FFFE)))
    assert choose_mark(tokenizer, "a", "\U00100000") == "\U00100001"
    assert choose_mark(tokenizer, plane[:77] + plane[78:]) == plane[77]
    with pytest.raises(RowError, match=r"bad_request: the prompt has all characters from U\+100000 to U\+10FFFD"):
        choose_mark(tokenizer, plane)


def test_limits_in_the_tokenizer_s_file_do_not_count():
    for text in ("hello river", "hello </s> river"):
        tokenizer, limited = vicuna(), vicuna()
        limited.backend_tokenizer.enable_truncation(3)
        limited.backend_tokenizer.enable_padding(length=50)
        assert encode_raw(limited, text) == encode_raw(tokenizer, text)


def test_a_tokenizer_whose_words_are_its_special_tokens(tmp_path):
    tokenizer = load_tokenizer(tiny_llama(tmp_path))
    with pytest.raises(RowError, match="bad_request: the prompt spells </s>, which this tokenizer cannot write as text"):
        encode_raw(tokenizer, "w5 </s> w6")
    assert encode_raw(tokenizer, "w5 x<s>x w6") == [5, 0, 6]  # an unknown word is not a special token in the text


def test_the_longest_special_token_counts():
    tokenizer = Tokenizer(models.BPE({symbol: id for id, symbol in enumerate("[]ab")}, []))
    names = ["[a", "[a]", "[a]b", "[b]"]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    mark = choose_mark(tokenizer, "")
    for text in ("[a]b", "[a][b]", "[aa[b", "[[a]]"):
        expected = tokenizer(text)["input_ids"]
        assert encode_text(tokenizer, text + mark_special(tokenizer, text, mark), templated=True, mark=mark)[: len(expected)] == expected
        assert max(encode_raw(tokenizer, text)) < 4


def test_a_tokenizer_without_special_tokens():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0, "b": 1}, [])))
    assert encode_raw(tokenizer, "ab") == [0, 1]


SPANS = [
    (llama3, "a 😀b", [(0, 1), (2, 2), (2, 3), (2, 3), (2, 3), (2, 3), (3, 4)]),  # blanks at the ends of tokens are not counted
    (qwen3, "a e\u0301b", [(0, 1), (1, 2), (2, 3), (2, 3), (4, 5)]),  # of what the normalizer joins, the first counts
    (vicuna, "a😀b", [(0, 1), (0, 1), (1, 2), (1, 2), (1, 2), (1, 2), (2, 3)]),
    (vicuna, "</s>", [(0, 1), (0, 1), (1, 2), (2, 3), (3, 4)]),
]


@pytest.mark.parametrize(("family", "text", "spans"), SPANS)
def test_places_of_tokens(family, text, spans):
    tokenizer = family()
    assert token_spans(tokenizer, text, choose_mark(tokenizer, text)) == spans


def test_a_special_token_has_one_place():
    assert token_spans(vicuna(), "the</s>", None)[-1] == (3, 7)
