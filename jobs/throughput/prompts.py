"""Prompts as token ids, the same for every system, cut or joined to the length that a cell asks for."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from engine.chat_template import render_chat
from engine.encoding import encode_text
from engine.errors import UserError
from pipeline.wording import did_you_mean

_PLACE = "\ue000"  # of the text in a chat template: a private-use character, which no template writes


def read_texts(paths: str | Sequence[str]) -> list[str]:
    """The texts of JSON Lines files, one of each file in turn, so that any number of the first ones is of all files.

    paths: files, or folders whose *.jsonl are read. Raises UserError for a path or a line that cannot be used.
    """
    files: list[Path] = []
    for path in [paths] if isinstance(paths, str) else paths:
        place = Path(path).expanduser()
        found = sorted(place.glob("*.jsonl")) if place.is_dir() else [place] if place.is_file() else []
        if not found:
            hint = "there is no *.jsonl in it" if place.is_dir() else f"it does not exist{did_you_mean(str(place))}"
            raise UserError(f"prompts.path '{path}': {hint}")
        files += found
    columns = [_read_file(file) for file in files]
    return [text for texts in itertools.zip_longest(*columns) for text in texts if text is not None]


def _read_file(file: Path) -> list[str]:
    texts = []
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            try:
                text = _text_of(json.loads(line))
            except ValueError:
                text = None
            if not text:
                raise UserError(f"prompts.path: '{file}':{number} has no text; allowed: a JSON object with `prompt`, `turns` or `messages`")
            texts.append(text)
    if not texts:
        raise UserError(f"prompts.path: '{file}' has no prompt")
    return texts


def _text_of(record: Any) -> str | None:
    if not isinstance(record, dict):
        return None
    turns, messages = record.get("turns"), record.get("messages")
    text = record.get("prompt")
    if text is None and isinstance(turns, list) and turns:
        text = turns[0]
    if text is None and isinstance(messages, list) and messages and isinstance(messages[-1], dict):
        text = messages[-1].get("content")
    return text if isinstance(text, str) else None


class PromptPool:
    """Texts under the tokenizer's chat template, or raw where it has none.

    Args:
        texts: at least one.
        max_tokens: of prompt and output together.
    """

    def __init__(self, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_tokens: int):
        self._texts, self._tokenizer, self._max_tokens = texts, tokenizer, max_tokens
        self._head, self._tail = _find_frame(tokenizer)
        self._encoded: dict[int, list[int]] = {}

    def take(self, first: int, num_rows: int, *, num_tokens: int | None, num_output: int) -> list[list[int]]:
        """Prompts from the text with number `first` on; after the last text comes the first one again.

        num_tokens: None is each text as long as it is; else so many tokens, in which a text is cut, or followed by the next ones.
        Raises UserError for a length that has no room for the template, or that leaves none for `num_output` tokens.
        """
        frame = len(self._head) + len(self._tail)
        if num_tokens is not None and num_tokens <= frame:
            raise UserError(f"grid.prompt_tokens has {num_tokens}; allowed: more than {frame}, which the chat template takes")
        prompts = []
        for index in range(first, first + num_rows):
            body = self._body(index) if num_tokens is None else self._joined(index, num_tokens - frame)
            prompt = [*self._head, *body, *self._tail]
            if len(prompt) + num_output > self._max_tokens:
                raise UserError(
                    f"a prompt of {len(prompt)} tokens with grid.output_tokens={num_output}; allowed: {self._max_tokens} together"
                )
            prompts.append(prompt)
        return prompts

    def text(self, prompt: Sequence[int]) -> str:
        """Of a prompt, special tokens spelled out."""
        return self._tokenizer.decode(prompt)

    def _body(self, index: int) -> list[int]:
        index %= len(self._texts)
        if index not in self._encoded:
            self._encoded[index] = self._tokenizer(self._texts[index], add_special_tokens=False, verbose=False)["input_ids"]
        return self._encoded[index]

    def _joined(self, index: int, num_tokens: int) -> list[int]:
        body: list[int] = []
        while len(body) < num_tokens:
            body += self._body(index)
            index += 1
        return body[:num_tokens]


def _find_frame(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Token ids before and after a user's text."""
    if not tokenizer.chat_template:
        first = encode_text(tokenizer, "a", templated=False)[:1]
        return (first if first == [tokenizer.bos_token_id] else []), []
    rendered = render_chat(tokenizer, [{"role": "user", "content": _PLACE}], {}, None)
    head, _, tail = rendered.partition(_PLACE)
    return tuple(encode_text(tokenizer, part, templated=True) for part in (head, tail))
