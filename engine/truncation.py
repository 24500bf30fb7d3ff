"""Prompts that are too long: refused, or cut from one end, at token boundaries and never inside a character."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from engine.errors import RowError

TRUNCATE = ("error", "left", "right")

#: (start, end) of each token of a text, in characters
Spans = list[tuple[int, int]]


def num_tokens_allowed(num_tokens: int, *, truncate: str, max_tokens: int, max_model_len: int) -> int | None:
    """How many tokens a prompt of `num_tokens` is to be cut to; None: it stays as it is.

    It is cut so that `max_tokens` fit behind it. With "error" nothing is, nor where `max_tokens` alone fill the model: then one token of
    room is enough.

    Raises RowError("prompt_too_long").
    """
    num_allowed = max_model_len - (1 if truncate == "error" or max_tokens >= max_model_len else max_tokens)
    if num_tokens <= num_allowed:
        return None
    if truncate == "error":
        message = f"the prompt has {num_tokens} tokens; allowed: {max_model_len - 1} (max_model_len - 1)"
        raise RowError("prompt_too_long", message, num_tokens)
    if max_tokens >= max_model_len:
        raise RowError(
            "prompt_too_long",
            f"the prompt has {num_tokens} tokens, and max_tokens={max_tokens} leaves no room for it; allowed: below {max_model_len}",
            num_tokens,
        )
    return num_allowed


def cut_token_ids(token_ids: Sequence[int], num_allowed: int, side: str) -> Sequence[int]:
    """`num_allowed` (>= 1) token ids, the others cut from `side`."""
    return token_ids[-num_allowed:] if side == "left" else token_ids[:num_allowed]


def cut_texts(
    texts: Sequence[str],
    spans: Sequence[Spans],
    *,
    side: str,
    num_tokens: int,
    num_allowed: int,
    encode: Callable[[list[str]], tuple[str, list[int]]],
) -> tuple[str, list[int]]:
    """The prompt and its ids after the longest texts have been cut from `side`, all to one number of tokens.

    texts: those of the prompt that may be cut; the rest of it stays. spans: their tokens, each text taken alone.
    num_tokens: of the whole prompt, and num_allowed of it. encode: the prompt with such texts in it, and its ids.

    Raises RowError("prompt_too_long") when no text would be left.
    """
    lengths = [len(span) for span in spans]
    most, num_less = max(lengths), num_tokens - num_allowed
    factor = 1
    while True:
        most = _shorten(lengths, most, num_less)
        cut = [_cut(text, span, most, side) for text, span in zip(texts, spans, strict=True)] if most else []
        if not any(cut):
            raise RowError(
                "prompt_too_long",
                f"the prompt has {num_tokens} tokens, and no text would be left of it in {num_allowed} (max_model_len - max_tokens)",
                num_tokens,
            )
        prompt, token_ids = encode(cut)
        if len(token_ids) <= num_allowed:
            return prompt, token_ids
        # A cut text can begin or end with other tokens than it had there, so a few too many may be left. The factor ends the search soon
        # where cutting does not help because the template drops the text.
        factor *= 2
        num_less = factor * (len(token_ids) - num_allowed)


def _shorten(lengths: Sequence[int], most: int, num_less: int) -> int:
    """The largest number below `most` to cut texts to, so that they have `num_less` fewer tokens than with `most`; 0 if there is none.

    >>> _shorten([9, 2, 5], 9, 6)  # 9 + 2 + 5 -> 4 + 2 + 4
    4
    """

    def total(most: int) -> int:
        return sum(min(length, most) for length in lengths)

    return max(0, bisect_right(range(most), total(most) - num_less, key=total) - 1)


def _cut(text: str, spans: Spans, most: int, side: str) -> str:
    """The `most` tokens of `text` at the other end of `side`, about: a character of several tokens stays whole."""
    if len(spans) <= most:
        return text
    first_right = most if side == "right" else len(spans) - most
    end, start = spans[first_right - 1][1], spans[first_right][0]
    if side == "left":
        return text[start:]
    # between the two there may be a blank that no token counts, or a mark that the normalizer joined to the character before it
    return text[: end if text[end:start].isspace() else start]
