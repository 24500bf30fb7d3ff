"""From text to token ids, where special tokens that a user's text spells (<|im_end|>) stay text.

A chat template writes special tokens around user text that may spell the same ones. A mark tells them apart: a private-use character
that occurs nowhere else in the row goes in front of each special token in user text, before templating. In the templated text a special
token without the mark is the template's. Such text is encoded by a copy of the tokenizer that knows the special tokens by other names,
so that their usual spelling is text like any other. With the mark M, and <|im_end|> being token 2, once in user text and once after it:

    M<|im_end|><|im_end|>  ->  <|im_end|>M2M  ->  [..., 2]
"""

from __future__ import annotations

import re
from functools import lru_cache

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerBase

from engine.errors import RowError

_MARKS = range(0x100000, 0x10FFFE)  # the last private-use plane


def choose_mark(tokenizer: PreTrainedTokenizerBase, *texts: str) -> str:
    """A character that is in none of `texts`, nor in a special token. Raises RowError("bad_request") when there is none left."""
    used = set(_special_pattern(tokenizer)).union(*texts)
    mark = next((mark for mark in map(chr, _MARKS) if mark not in used), None)
    if mark is None:
        raise RowError("bad_request", f"the prompt has all characters from U+{_MARKS[0]:X} to U+{_MARKS[-1]:X}; allowed: all but one")
    return mark


def mark_special(tokenizer: PreTrainedTokenizerBase, text: str, mark: str | None) -> str:
    """User text with the mark in front of each special token that it spells; unchanged with None."""
    return text if mark is None else re.sub(_special_pattern(tokenizer), rf"{mark}\g<0>", text)


def unmark(text: str, mark: str | None) -> str:
    return text if mark is None else text.replace(mark, "")


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, *, templated: bool, mark: str | None = None) -> list[int]:
    """Token ids of a prompt, with one BOS at most.

    Text from a chat template carries all its special tokens already, so none are added. Raw text gets those that the tokenizer itself
    adds (Llama-3: a BOS; SmolLM2: none), unless it begins with the BOS as a special token.

    mark: special tokens behind it stay text; None: every special token in `text` is one.

    Raises RowError("bad_request") when the tokenizer writes what is to stay text with a special token all the same.
    """
    has_bos = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
    return _encode(tokenizer, text, mark, add_special_tokens=not (templated or has_bos))[0]


def token_spans(tokenizer: PreTrainedTokenizerBase, text: str, mark: str | None) -> list[tuple[int, int]]:
    """Where each token of a user's text begins and ends, in characters. The tokens of one character have the same place.

    mark: special tokens are text; None: they are special.
    """
    return _encode(tokenizer, mark_special(tokenizer, text, mark), mark, add_special_tokens=False)[1]


def _encode(
    tokenizer: PreTrainedTokenizerBase, text: str, mark: str | None, *, add_special_tokens: bool
) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids and spans (of `text` without marks, as far as it has no special token without one)."""
    special = special_tokens(tokenizer)
    # a normalizer can make special tokens of text that does not spell them
    is_normalized = tokenizer.backend_tokenizer.normalizer is not None and any(token.normalized for token in special.values())
    if mark is None or (mark not in text and not is_normalized):
        encoding = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False).encodings[0]
        return encoding.ids, encoding.offsets
    copy, id_of = _copy_with_other_names(tokenizer, mark)
    encoding = copy.encode(_rename_special(tokenizer, text, mark), add_special_tokens=add_special_tokens)
    for token, is_added in zip(encoding.ids, encoding.special_tokens_mask, strict=True):
        if token in special and not is_added and token != tokenizer.unk_token_id:
            spelled = special[token].content
            raise RowError("bad_request", f"the prompt spells {spelled}, which this tokenizer cannot write as text (see parse_special)")
    return [id_of.get(token, token) for token in encoding.ids], encoding.offsets


def _rename_special(tokenizer: PreTrainedTokenizerBase, text: str, mark: str) -> str:
    """`text` with the other names of the special tokens that have no mark, and without the marks."""
    id_of = {token.content: id for id, token in special_tokens(tokenizer).items()}

    def rename(match: re.Match) -> str:
        token = match[1] or ""  # a mark alone: the template changed what came after it
        return token if match[0].startswith(mark) else _other_name(id_of[token], mark)

    return re.sub(f"{mark}?({_special_pattern(tokenizer)})|{mark}", rename, text)


@lru_cache(maxsize=4)
def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, AddedToken]:
    """By id."""
    return {id: token for id, token in tokenizer.added_tokens_decoder.items() if token.special}


@lru_cache(maxsize=4)
def _special_pattern(tokenizer: PreTrainedTokenizerBase) -> str:
    """A regular expression for a special token, the longest where several match."""
    return _longest_of({token.content for token in special_tokens(tokenizer).values()}) or "(?!)"


def _longest_of(texts: set[str]) -> str:
    """A regular expression for the longest of `texts`, as a tree: `(?:a(?:b|c))` for ab and ac.

    Mistral has a thousand special tokens; a list of them would be gone through at every "<" of a document.
    """
    firsts = sorted({text[0] for text in texts if text})
    branches = [re.escape(first) + _longest_of({text[1:] for text in texts if text[:1] == first}) for first in firsts]
    return f"(?:{'|'.join(branches)}){'?' if '' in texts else ''}" if branches else ""


def _other_name(id: int, mark: str) -> str:
    return f"{mark}{id}{mark}"


@lru_cache(maxsize=4)
def _copy_with_other_names(tokenizer: PreTrainedTokenizerBase, mark: str) -> tuple[Tokenizer, dict[int, int]]:
    """A copy of the tokenizer with a second name for each special token, which alone it takes for special, and the tokens' own ids."""
    copy = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    copy.no_truncation()
    copy.no_padding()
    copy.encode_special_tokens = True  # the usual names are encoded as text
    # not their rules about the characters around them: what the template wrote is special
    other = [
        AddedToken(_other_name(id, mark), lstrip=token.lstrip, rstrip=token.rstrip, normalized=False, special=False)
        for id, token in special_tokens(tokenizer).items()
    ]
    copy.add_tokens(other)
    return copy, {copy.token_to_id(_other_name(id, mark)): id for id in special_tokens(tokenizer)}
