"""From a request to a row: the prompt's text and ids, checked. A bad request raises RowError, and only its own row ends."""

from __future__ import annotations

import time
from collections.abc import Sequence

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from engine.errors import RowError
from engine.law.keys import row_key
from engine.models.loading import encode_text
from engine.params import Request, SamplingParams
from engine.row import Row


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
    if type(request.sample) is not int:
        raise RowError("bad_request", f"sample={request.sample!r}; allowed: an integer")
    stop_ids = frozenset([*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)])
    if params.min_tokens and len(stop_ids) >= vocab_size:
        raise RowError("bad_params", f"min_tokens={params.min_tokens}, but every token is a stop id; allowed: at least one that is not")
    prompt, token_ids = _prompt_tokens(request, tokenizer, vocab_size)
    if not token_ids:
        raise RowError("empty_prompt", "the prompt has no tokens")
    if len(token_ids) >= max_model_len:
        raise RowError("prompt_too_long", f"the prompt has {len(token_ids)} tokens; allowed: {max_model_len - 1} (max_model_len - 1)")
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


def _prompt_tokens(request: Request, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> tuple[str | None, Sequence[int]]:
    given = [name for name in ("prompt", "messages", "token_ids") if getattr(request, name) is not None]
    if len(given) != 1:
        raise RowError(
            "bad_request", f"a request has {' and '.join(given) or 'no prompt'}; allowed: exactly one of prompt, messages, token_ids"
        )
    if request.token_ids is not None:
        if not isinstance(request.token_ids, Sequence) or isinstance(request.token_ids, str | bytes):
            raise RowError("bad_request", f"token_ids is a {type(request.token_ids).__name__}; allowed: a list of integers")
        outside = [token for token in request.token_ids if type(token) is not int or not 0 <= token < vocab_size]
        if outside:
            raise RowError("bad_request", f"token_ids has {outside[:5]}; allowed: integers from 0 to {vocab_size - 1}")
        text = None if tokenizer is None else tokenizer.decode(request.token_ids)
        return text, request.token_ids
    if tokenizer is None:
        raise RowError("bad_request", "this engine has no tokenizer; allowed: token_ids")
    if request.prompt is not None:
        if not isinstance(request.prompt, str):
            raise RowError("bad_request", f"prompt is a {type(request.prompt).__name__}; allowed: a string")
        text = request.prompt
    else:
        text = render_messages(request.messages, tokenizer)
    # surrogates cannot be encoded: they come from JSON escapes such as "\ud800"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError("bad_request", f"the prompt is not valid Unicode: {error.reason} at character {error.start}") from None
    return text, encode_text(tokenizer, text, templated=request.messages is not None)


def render_messages(messages: Sequence, tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat template's text, up to where the assistant's answer begins.

    Raises RowError("template_error") when the tokenizer has no template, or the template refuses the messages.
    """
    if not tokenizer.chat_template:
        raise RowError("template_error", "the tokenizer has no chat template; give a prompt in place of messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RowError("template_error", f"messages is {messages!r}; allowed: a list of {{role, content}} with at least one entry")
    for place, message in enumerate(messages):
        for field in ("role", "content"):
            value = message.get(field) if hasattr(message, "get") else None
            if not isinstance(value, str):
                raise RowError("template_error", f"messages[{place}].{field} is {value!r}; allowed: a string")
        if message["role"] not in ("system", "user", "assistant"):
            raise RowError("template_error", f"messages[{place}].role is {message['role']!r}; allowed: system, user, assistant")
    try:
        return tokenizer.apply_chat_template([dict(message) for message in messages], tokenize=False, add_generation_prompt=True)
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        raise RowError("template_error", f"the chat template refused the messages: {error}") from None
