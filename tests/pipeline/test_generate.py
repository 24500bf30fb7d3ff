"""From a row to the engine's request."""

import json

import pytest

from engine.errors import RowError
from engine.params import Request, SamplingParams
from pipeline.config import InputSection
from pipeline.generate import RowOptions, make_request

USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "be brief"}
DEVELOPER = {"role": "developer", "content": "be long"}


def make(row=None, has_chat_template=True, **section) -> Request:
    row = {"id": "a", "sample": 1, "prompt": None, "messages": None, "params": None, "error_type": None, **(row or {"prompt": "hi"})}
    options = RowOptions(defaults=SamplingParams(max_tokens=9), input=InputSection(path="in", **section), seed=0)
    return make_request(row, options, has_chat_template=has_chat_template)


@pytest.mark.parametrize(
    ("row", "options", "prompt", "messages"),
    [
        ({"prompt": "hi"}, {}, None, [USER]),
        ({"prompt": "hi"}, {"chat": True}, None, [USER]),
        ({"prompt": "hi"}, {"chat": False}, "hi", None),
        ({"prompt": "hi"}, {"has_chat_template": False}, "hi", None),
        ({"messages": json.dumps([USER])}, {"chat": False}, None, [USER]),
        ({"prompt": "hi"}, {"system": "be brief"}, None, [SYSTEM, USER]),
        ({"messages": json.dumps([DEVELOPER, USER])}, {"system": "be brief"}, None, [DEVELOPER, USER]),
    ],
)
def test_what_is_templated(row, options, prompt, messages):
    request = make(row, **options)
    assert (request.prompt, request.messages) == (prompt, messages)


def test_the_options_of_a_row_reach_the_engine():
    options = {"template_kwargs": {"enable_thinking": False}, "truncate": "left", "parse_special": True}
    request = make({"prompt": "hi", "params": '{"top_k": 5}'}, **options)
    assert (request.id, request.sample) == ("a", 1)
    assert request.params == SamplingParams(max_tokens=9, top_k=5)
    assert {name: getattr(request, name) for name in options} == options
    assert {name: getattr(make(), name) for name in options} == {name: getattr(Request(), name) for name in options}


@pytest.mark.parametrize(
    ("row", "section", "message"),
    [
        ({"messages": json.dumps([USER])}, {}, "the tokenizer has no chat template"),
        ({"prompt": "hi"}, {"chat": True}, "the tokenizer has no chat template"),
        ({"prompt": "hi"}, {"system": "s"}, "input.system is set, but the prompt is raw text"),
        ({"prompt": "hi"}, {"template_kwargs": {"a": 1}}, "input.template_kwargs is set, but the prompt is raw text"),
    ],
)
def test_what_needs_a_chat_template_is_an_error_row_without_one(row, section, message):
    with pytest.raises(RowError, match=message) as caught:
        make(row, has_chat_template=False, **section)
    assert caught.value.type == "template_error"


def test_a_row_that_could_not_be_read_keeps_its_error():
    with pytest.raises(RowError) as caught:
        make({"error_type": "bad_record", "error_message": "in.jsonl:1: x"})
    assert (caught.value.type, caught.value.message) == ("bad_record", "in.jsonl:1: x")
