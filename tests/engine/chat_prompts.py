"""Requests with chats, made ready for a slot without an engine."""

from __future__ import annotations

import pytest

from engine.errors import RowError
from engine.params import Request, SamplingParams
from engine.prompting import prepare_row
from engine.row import Row


def prepare(tokenizer, *, max_model_len: int = 4096, max_tokens: int = 8, vocab_size: int = 1000, **request) -> Row:
    return prepare_row(
        Request(id="a", params=SamplingParams(max_tokens=max_tokens), **request),
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_ids=(),
        engine_seed=0,
    )


def refusal(tokenizer, **request) -> RowError:
    with pytest.raises(RowError) as caught:
        prepare(tokenizer, **request)
    return caught.value


def user(content: str) -> list[dict]:
    return [{"role": "user", "content": content}]


def chat(system: str, question: str, answer: str, last: str) -> list[dict]:
    roles = ("system", "user", "assistant", "user")
    return [{"role": role, "content": content} for role, content in zip(roles, (system, question, answer, last), strict=True)]


def templated(tokenizer, messages: list[dict], **variables) -> tuple[str, list[int]]:
    """transformers' own text and ids."""
    options = {"add_generation_prompt": True, **variables}
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    return text, tokenizer.apply_chat_template(messages, return_dict=False, **options)
