"""Messages and template variables in, text up to where the assistant's answer begins out."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from engine.encoding import mark_special
from engine.errors import RowError
from engine.params import ROLES

#: names that a template variable cannot have: apply_chat_template's own parameters, but for two that it only hands on
_TAKEN_NAMES = {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {"tools", "documents"}

#: what a template can raise over messages that it was not written for
_TEMPLATE_ERRORS = (TemplateError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError)


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages without their null fields. Which roles follow which, the template decides.

    Raises RowError("template_error") for anything but a list of maps with a role and a content, of what JSON can hold.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RowError("template_error", f"messages is {messages!r}; allowed: a list of {{role, content}} with at least one entry")
    for place, message in enumerate(messages):
        fields = message if isinstance(message, Mapping) else {}
        role, content = fields.get("role"), fields.get("content")
        if role not in ROLES:
            raise RowError("template_error", f"messages[{place}].role is {role!r}; allowed: {', '.join(ROLES)}")
        if not isinstance(content, str) and (content is not None or not fields.get("tool_calls")):
            raise RowError("template_error", f"messages[{place}].content is {content!r}; allowed: a string, or null beside tool_calls")
    chat = [{name: value for name, value in message.items() if value is not None} for message in messages]
    _require_json("template_error", "messages", chat)
    return chat


def check_template_kwargs(variables: Any) -> None:
    """Raises RowError("bad_request") for a name that is taken and for what JSON cannot hold."""
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise RowError("bad_request", f"template_kwargs is {variables!r}; allowed: a map from names to values")
    taken = sorted(_TAKEN_NAMES.intersection(variables))
    if taken:
        raise RowError("bad_request", f"template_kwargs has {', '.join(taken)}; allowed: variables of the chat template")
    _require_json("bad_request", "template_kwargs", dict(variables))


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], mark: str | None
) -> str:
    """The chat template's text, with a mark in front of each special token that messages and variables spell (see engine.encoding).

    Raises RowError: template_error when the tokenizer has no template, or the template refuses the messages; bad_request for a
    variable that the template does not have.
    """
    if not tokenizer.chat_template:
        raise RowError("template_error", "the tokenizer has no chat template; give a prompt in place of messages")
    mark_text = partial(mark_special, tokenizer, mark=mark)
    try:
        template = tokenizer.get_chat_template(tools=variables.get("tools"))
        for name in variables:
            if name in tokenizer.special_tokens_map or not re.search(rf"\b{re.escape(name)}\b", template):
                raise RowError("bad_request", f"template_kwargs has {name}, which is not a variable that the chat template leaves open")
        return tokenizer.apply_chat_template(
            _map_text(messages, mark_text), tokenize=False, add_generation_prompt=True, **_map_text(variables, mark_text)
        )
    except _TEMPLATE_ERRORS as error:
        raise RowError("template_error", f"the chat template refused the messages: {error}") from None


def _require_json(error_type: str, name: str, value: Any) -> None:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise RowError(error_type, f"{name} has what JSON cannot hold: {error}") from None


def _map_text(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with every string in it changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_text(key, change): _map_text(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_text(item, change) for item in value]
    return value
