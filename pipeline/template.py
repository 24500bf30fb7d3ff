"""`input.template`: a Jinja2 template over a record's columns that makes its prompt.

Sandboxed, without what differs from run to run (`random`, `lipsum`), and without silence: a column that is missing or null is undefined,
which only `is defined` and `default` may look at.
"""

from __future__ import annotations

import datetime
import decimal
import functools
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError, TemplateSyntaxError, Undefined, UndefinedError, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import RowError, UserError

#: what an expression of a template can raise over values that it was not written for
_VALUE_ERRORS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)

#: what may stand in a prompt. Anything else (a function, a generator) would print its address in memory, another one in each run.
_PRINTABLE = (
    *(str, int, float, list, tuple, Mapping, Undefined),
    *(datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID),
)


@dataclass(frozen=True)
class PromptTemplate:
    """columns: those that it reads. required: of these the ones that it reads without `is defined` or `default`.

    whole: of these the ones that it does not only look into (`doc.title` looks into `doc`).
    """

    columns: list[str]
    required: list[str]
    whole: set[str]
    template: Template

    def render(self, record: Mapping[str, Any]) -> str:
        """The prompt. Raises RowError("template_error") for a column that is missing or null, or a value that does not fit."""
        try:
            return self.template.render({name: _as_text(record[name]) for name in self.columns if record.get(name) is not None})
        except UndefinedError as error:
            raise RowError("template_error", f"input.template: {error.message} (missing or null)") from None
        except (TemplateError, *_VALUE_ERRORS) as error:
            raise RowError("template_error", f"input.template: {error}") from None


@functools.lru_cache(maxsize=8)
def compile_template(source: str) -> PromptTemplate:
    """Raises UserError for a template that is no Jinja2, with the line, and for one that reads no column."""
    environment = _make_environment()
    try:
        tree = environment.parse(source)
        template = environment.from_string(source)
    except TemplateSyntaxError as error:
        raise UserError(f"input.template, line {error.lineno}: {error.message}; allowed: a Jinja2 template") from None
    for node in tree.find_all((nodes.Include, nodes.Extends, nodes.Import, nodes.FromImport)):
        raise UserError(f"input.template, line {node.lineno}: it reads another template; allowed: one that is whole")
    names = [node.name for node in tree.find_all(nodes.Name)]
    called = [node.node.name for node in tree.find_all(nodes.Call) if isinstance(node.node, nodes.Name)]
    columns = meta.find_undeclared_variables(tree)
    columns |= {name for name in environment.globals if names.count(name) > called.count(name)}  # `range` is a column, `range(3)` is not
    if not columns:
        raise UserError(f"input.template={source!r} reads no column; allowed: Jinja2 that does, as 'Summarise: {{{{ document }}}}'")
    looked_into = [node.node.name for node in tree.find_all((nodes.Getattr, nodes.Getitem)) if isinstance(node.node, nodes.Name)]
    required = columns - _find_optional(tree)
    whole = {name for name in columns if names.count(name) > looked_into.count(name)}
    return PromptTemplate(sorted(columns), sorted(required), whole, template)


def _find_optional(tree: nodes.Template) -> set[str]:
    """The names that `is defined`, `is undefined` or `default` look at."""
    tests = [node.node for node in tree.find_all(nodes.Test) if node.name in ("defined", "undefined")]
    filters = [node.node for node in tree.find_all(nodes.Filter) if node.name in ("default", "d")]
    return {node.name for node in [*tests, *filters] if isinstance(node, nodes.Name)}


class _Environment(ImmutableSandboxedEnvironment):
    """A map's keys come before its methods (`order.items`), and a null in it is missing."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, Mapping) and attribute in obj:
            return self.getitem(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        value = super().getitem(obj, argument)
        return self.undefined(obj=obj, name=argument) if value is None else value


def _make_environment() -> _Environment:
    environment = _Environment(undefined=StrictUndefined, finalize=_refuse_unprintable)
    del environment.globals["lipsum"], environment.filters["random"]
    return environment


def _refuse_unprintable(value: Any) -> Any:
    if value is None:
        raise UndefinedError("an expression gives nothing")
    if not isinstance(value, _PRINTABLE):
        raise TypeError(f"an expression gives a {type(value).__name__}, which is no text")
    return value


def _as_text(value: Any) -> Any:
    """Parquet's binary columns mostly hold text."""
    return value.decode("utf-8") if isinstance(value, bytes) else value
