"""Where a row ends: EOS and stop ids, stop strings, max_tokens; and the text that is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from engine.encoding import special_tokens
from engine.row import Row


@dataclass(frozen=True, kw_only=True)
class Cut:
    """What is kept of a cycle's tokens. accepted: drafted tokens up to the one that ends the row, before any cut at max_tokens."""

    kept: list[int]
    accepted: int
    finish_reason: str | None


def cut_tokens(row: Row, tokens: list[int], num_accepted: int, tokenizer: PreTrainedTokenizerBase | None) -> Cut:
    """Cut a cycle's tokens (accepted ones first, then the bonus) at whatever ends the row first."""
    end = _first_end(row, tokens, tokenizer)
    room = row.max_tokens - row.num_output_tokens
    if end is not None:
        num_accepted = min(num_accepted, end + 1)
        tokens = tokens[: end + 1]
    kept = tokens[:room]
    reason = None
    if end is not None and len(kept) == end + 1:
        reason = "stop"
    elif len(kept) == room:
        reason = "length"
    return Cut(kept=kept, accepted=num_accepted, finish_reason=reason)


def _first_end(row: Row, tokens: list[int], tokenizer: PreTrainedTokenizerBase | None) -> int | None:
    end = next((index for index, token in enumerate(tokens) if token in row.stop_ids), None)
    if row.params.stop and tokenizer is not None:
        before_end = tokens if end is None else tokens[:end]
        end_of_string = _stop_string_end(row, before_end, tokenizer)
        end = end if end_of_string is None else end_of_string
    return end


def _stop_string_end(row: Row, tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Index of the token that completes a stop string, after min_tokens."""
    window = _tail(row, tokenizer)
    if not _completes(row.params.stop, tokenizer.decode(window + tokens, skip_special_tokens=True), 0):
        return None
    for index in range(len(tokens)):
        if row.num_output_tokens + index + 1 < row.params.min_tokens:
            continue
        before = _settled(tokenizer.decode(window + tokens[:index], skip_special_tokens=True))
        text = tokenizer.decode(window + tokens[: index + 1], skip_special_tokens=True)
        if _completes(row.params.stop, text, len(before)):
            return index
    return None


def _tail(row: Row, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The output's last tokens, as many as any stop string may have: a character takes 4 at most, and those without text do not count."""
    visible = _visible_ids(tokenizer)
    num_missing = 4 * max(map(len, row.params.stop)) + 16
    start = len(row.tokens)
    while num_missing and start > row.num_prompt_tokens:
        start -= 1
        num_missing -= row.tokens[start] in visible
    return row.tokens[start:]


@lru_cache(maxsize=4)
def _visible_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of tokens that have a text: neither special, nor of the model's padding alone."""
    return frozenset(tokenizer.get_vocab().values()) - special_tokens(tokenizer).keys()


def _settled(text: str) -> str:
    """Text without the replacement characters of a character whose last byte has not come yet."""
    return text.rstrip("�")


def _completes(stops: Sequence[str], text: str, old_length: int) -> bool:
    return _first_stop(stops, text, old_length) is not None


def _first_stop(stops: Sequence[str], text: str, old_length: int) -> int | None:
    """Where the first stop string begins that ends after `old_length`."""
    found = [text.find(stop, max(0, old_length - len(stop) + 1)) for stop in stops]
    return min((place for place in found if place >= 0), default=None)


def final_text(row: Row, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """The output as text, without the stop, EOS and special tokens (DESIGN.md section 6)."""
    if tokenizer is None:
        return ""
    output = row.output
    if row.finish_reason == "stop" and output[-1] in row.stop_ids:
        return tokenizer.decode(output[:-1], skip_special_tokens=True)
    text = tokenizer.decode(output, skip_special_tokens=True)
    if row.finish_reason == "stop":
        before = _settled(tokenizer.decode(output[:-1], skip_special_tokens=True))
        place = _first_stop(row.params.stop, text, len(before))
        return text[:place]
    return text
