"""`input.template`: what it renders, and what it refuses."""

import random

import pytest

from engine.errors import RowError, UserError
from pipeline.template import compile_template


@pytest.mark.parametrize(
    ("source", "record", "expected"),
    [
        ("Summarise:\n\n{{ document }}", {"document": "a <b> & c"}, "Summarise:\n\na <b> & c"),
        ("{{ order.items }} {{ order['keys'] }}", {"order": {"items": 3, "keys": "k"}}, "3 k"),
        ("{% for t in tags %}[{{ t|upper }}]{% endfor %}", {"tags": ["a", "b"]}, "[A][B]"),
        ("{{ turns[0].text }}", {"turns": [{"text": "hi"}]}, "hi"),
        ("{% if title is defined %}{{ title }}: {% endif %}{{ text }}", {"title": None, "text": "x"}, "x"),
        ("{{ doc.title | default('none') }}", {"doc": {"title": None}}, "none"),
        ("{% set n = 2 %}{% for i in range(n) %}{{ text }}{% endfor %}", {"text": "x"}, "xx"),
        ("{{ text }}", {"text": "grün".encode()}, "grün"),
        ("{{ count + 1 }}", {"count": 1}, "2"),
        ("{{ range }} of {{ text }}", {"range": "1-5", "text": "x"}, "1-5 of x"),
        ("{{ dict }}", {"dict": "a"}, "a"),
        ("{{ title | default('T') }} {{ text }}", {"text": "x"}, "T x"),
    ],
)
def test_templates_render(source, record, expected):
    assert compile_template(source).render(record) == expected


@pytest.mark.parametrize(
    ("source", "record", "message"),
    [
        ("{{ document }}", {}, "'document' is undefined (missing or null)"),
        ("{{ document }}", {"document": None}, "'document' is undefined (missing or null)"),
        ("{% if document %}{% endif %}", {"document": None}, "'document' is undefined"),
        ("{{ doc.title }}", {"doc": {}}, "has no attribute 'title'"),
        ("{{ doc.title }}", {"doc": {"title": None}}, "has no attribute 'title'"),
        ("{% for t in tags %}{{ t }}{% endfor %}", {"tags": ["a", None]}, "null"),
        ("{{ text + 1 }}", {"text": "x"}, "can only concatenate str"),
        ("{{ 1 // count }}", {"count": 0}, "division"),
        ("{{ text }}", {"text": b"\xff"}, "invalid start byte"),
        ("{{ text.__class__ }}", {"text": "x"}, "unsafe"),
        ("{{ tags.append(1) }}", {"tags": []}, "unsafe"),
        ("{% for i in range(10 ** 9) %}{{ text }}{% endfor %}", {"text": "x"}, "Range too big"),
        ("{{ text | map('upper') }}", {"text": "x"}, "gives a generator, which is no text"),
        ("{{ text }}{{ namespace }}", {"text": "x"}, "which is no text"),
        ("{{ self }}{{ text }}", {"text": "x"}, "gives a TemplateReference, which is no text"),
    ],
)
def test_a_record_that_does_not_fit_is_a_row_error(source, record, message):
    with pytest.raises(RowError) as caught:
        compile_template(source).render(record)
    assert caught.value.type == "template_error"
    assert caught.value.message.startswith("input.template: ")
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{{ document", "input.template, line 2: unexpected end of template"),
        ("{{ document | nofilter }}", "line 1: No filter named 'nofilter'"),
        ("a\n{% include document %}", "line 2: it reads another template"),
        ("{% extends 'base' %}{{ document }}", "line 1: it reads another template"),
        ("{{ document | random }}", "line 1: No filter named 'random'"),  # not the same on every run
        ("{document}", "reads no column"),
        ("{% for i in range(3) %}{{ i }}{% endfor %}", "reads no column"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(source, message):
    with pytest.raises(UserError, match=message):
        compile_template(source)


@pytest.mark.parametrize(
    ("source", "columns", "whole"),
    [
        ("{{ a }} {{ b.c }} {{ d[0] }}", ["a", "b", "d"], {"a"}),
        ("{{ b.c }} {{ b }}", ["b"], {"b"}),
        ("{% set x = a %}{% for y in b.list %}{{ x }}{{ y.z }}{{ loop.index }}{% endfor %}{{ range(2) }}", ["a", "b"], {"a"}),
    ],
)
def test_the_columns_that_a_template_reads(source, columns, whole):
    template = compile_template(source)
    assert (template.columns, template.whole) == (columns, whole)


def test_nothing_in_a_template_depends_on_the_run():
    random.seed(0)
    with pytest.raises(RowError, match="'lipsum' is undefined"):
        compile_template("{{ lipsum() }} {{ a }}").render({"a": 1})


def test_a_column_with_a_default_need_not_be_there():
    template = compile_template("{{ title | default('T') }}{% if note is defined %}{{ note }}{% endif %}{{ range(2) }}{{ text }}")
    assert template.required == ["text"]
    assert template.columns == ["note", "text", "title"]
    assert compile_template("{{ title }}{{ title | default('T') }}").required == []
