"""From a request to a row: the prompt's text and ids, checked. A bad request raises RowError, and only its own row ends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from engine.chat_template import check_messages, check_template_kwargs, render_chat
from engine.encoding import choose_mark, encode_text, mark_special, token_spans, unmark
from engine.errors import RowError, unknown_name
from engine.law.keys import row_key
from engine.params import Request, SamplingParams
from engine.row import Row
from engine.truncation import TRUNCATE, cut_texts, cut_token_ids, num_tokens_allowed


def prepare_row(
    request: Request,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    max_model_len: int,
    eos_ids: Sequence[int],
    engine_seed: int,
) -> Row:
    """A row ready for a slot.

    Raises RowError: bad_params, bad_request, template_error, empty_prompt, prompt_too_long.
    """
    params = SamplingParams() if request.params is None else request.params
    if not isinstance(params, SamplingParams):
        raise RowError("bad_params", f"params is a {type(params).__name__}; allowed: SamplingParams")
    params.check(vocab_size)
    stop_ids = frozenset([*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)])
    if params.min_tokens and len(stop_ids) >= vocab_size:
        raise RowError("bad_params", f"min_tokens={params.min_tokens}, but every token is a stop id; allowed: at least one that is not")
    _check_fields(request)
    prompt, token_ids = _prompt_tokens(request, tokenizer, vocab_size, max_tokens=params.max_tokens, max_model_len=max_model_len)
    if not token_ids:
        raise RowError("empty_prompt", "the prompt has no tokens")
    seed = engine_seed if params.seed is None else params.seed
    return Row(
        request=request,
        params=params,
        seed=seed,
        key=row_key(seed, str(request.id), request.sample),
        prompt=prompt,
        tokens=list(token_ids),
        num_prompt_tokens=len(token_ids),
        max_tokens=min(params.max_tokens, max_model_len - len(token_ids)),
        stop_ids=stop_ids,
        started=time.perf_counter(),
    )


def _check_fields(request: Request) -> None:
    """The fields that do not depend on what kind of prompt it is."""
    if type(request.sample) is not int:
        raise RowError("bad_request", f"sample={request.sample!r}; allowed: an integer")
    if request.truncate not in TRUNCATE:
        raise RowError("bad_request", unknown_name("truncate", request.truncate, TRUNCATE))
    if not isinstance(request.parse_special, bool):
        raise RowError("bad_request", f"parse_special={request.parse_special!r}; allowed: true or false")
    check_template_kwargs(request.template_kwargs)
    given = [name for name in ("prompt", "messages", "token_ids") if getattr(request, name) is not None]
    if len(given) != 1:
        raise RowError(
            "bad_request", f"a request has {' and '.join(given) or 'no prompt'}; allowed: exactly one of prompt, messages, token_ids"
        )
    if request.template_kwargs and request.messages is None:
        raise RowError("bad_request", f"template_kwargs={request.template_kwargs!r} with {given[0]}; allowed: with messages")


def _prompt_tokens(
    request: Request, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, *, max_tokens: int, max_model_len: int
) -> tuple[str | None, Sequence[int]]:
    """The prompt's text, None without a tokenizer, and its ids, cut if they do not fit."""
    count_allowed = partial(num_tokens_allowed, truncate=request.truncate, max_tokens=max_tokens, max_model_len=max_model_len)
    if request.token_ids is not None:
        token_ids = _check_token_ids(request.token_ids, vocab_size)
        num_allowed = count_allowed(len(token_ids))
        if num_allowed is not None:
            token_ids = cut_token_ids(token_ids, num_allowed, request.truncate)
        return None if tokenizer is None else tokenizer.decode(token_ids), token_ids
    if tokenizer is None:
        raise RowError("bad_request", "this engine has no tokenizer; allowed: token_ids")
    prompt, token_ids = _encode_text_prompt(request, tokenizer, count_allowed)
    outside = [token for token in token_ids if token >= vocab_size]
    if outside:
        raise RowError("bad_request", f"the tokenizer gives token ids {outside[:5]}; the model's go from 0 to {vocab_size - 1}")
    return prompt, token_ids


def _check_token_ids(token_ids: Any, vocab_size: int) -> Sequence[int]:
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, str | bytes):
        raise RowError("bad_request", f"token_ids is a {type(token_ids).__name__}; allowed: a list of integers")
    outside = [token for token in token_ids if type(token) is not int or not 0 <= token < vocab_size]
    if outside:
        raise RowError("bad_request", f"token_ids has {outside[:5]}; allowed: integers from 0 to {vocab_size - 1}")
    return token_ids


def _encode_text_prompt(
    request: Request, tokenizer: PreTrainedTokenizerBase, count_allowed: Callable[[int], int | None]
) -> tuple[str, list[int]]:
    """The text and the ids of `prompt` or `messages`; count_allowed: see engine.truncation.num_tokens_allowed."""
    if request.messages is None:
        if not isinstance(request.prompt, str):
            raise RowError("bad_request", f"prompt is a {type(request.prompt).__name__}; allowed: a string")
        chat, texts = None, [request.prompt]
    else:
        chat = check_messages(request.messages)
        texts = [message.get("content", "") for message in chat]
    variables = dict(request.template_kwargs)
    mark = None
    if not request.parse_special:
        mark = choose_mark(tokenizer, json.dumps([texts, chat, variables, tokenizer.chat_template], ensure_ascii=False))

    def encode(texts: list[str]) -> tuple[str, list[int]]:
        if chat is None:
            marked = mark_special(tokenizer, texts[0], mark)
        else:
            messages = [
                {**message, "content": text} if "content" in message else message for message, text in zip(chat, texts, strict=True)
            ]
            marked = render_chat(tokenizer, messages, variables, mark)
        prompt = unmark(marked, mark)
        # surrogates cannot be encoded: they come from JSON escapes such as "\ud800"
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RowError("bad_request", f"the prompt is not valid Unicode: {error.reason} at character {error.start}") from None
        return prompt, encode_text(tokenizer, marked, templated=chat is not None, mark=mark)

    prompt, token_ids = encode(texts)
    num_allowed = count_allowed(len(token_ids))
    if num_allowed is None:
        return prompt, token_ids
    spans = [token_spans(tokenizer, text, mark) for text in texts]
    return cut_texts(texts, spans, side=request.truncate, num_tokens=len(token_ids), num_allowed=num_allowed, encode=encode)
