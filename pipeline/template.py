"""`input.template`: a Jinja2 template over a record's columns that makes its prompt.

Sandboxed, without what differs from run to run (`random`, `lipsum`), and without silence: a column that is missing or null is undefined,
which only `is defined` and `default` may look at.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError, TemplateSyntaxError, UndefinedError, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import RowError, UserError

#: what an expression of a template can raise over values that it was not written for
_VALUE_ERRORS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)


@dataclass(frozen=True)
class PromptTemplate:
    """columns: those that it reads. whole: of these the ones that it does not only look into (`doc.title` looks into `doc`)."""

    columns: list[str]
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
    columns = meta.find_undeclared_variables(tree) - set(environment.globals)
    if not columns:
        raise UserError(f"input.template={source!r} reads no column; allowed: Jinja2 that does, as 'Summarise: {{{{ document }}}}'")
    names = [node.name for node in tree.find_all(nodes.Name)]
    looked_into = [node.node.name for node in tree.find_all((nodes.Getattr, nodes.Getitem)) if isinstance(node.node, nodes.Name)]
    whole = {name for name in columns if names.count(name) > looked_into.count(name)}
    return PromptTemplate(sorted(columns), whole, template)


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
    environment = _Environment(undefined=StrictUndefined, finalize=_refuse_null)
    del environment.globals["lipsum"], environment.filters["random"]
    return environment


def _refuse_null(value: Any) -> Any:
    if value is None:
        raise UndefinedError("an expression gives nothing")
    return value


def _as_text(value: Any) -> Any:
    """Parquet's binary columns mostly hold text."""
    return value.decode("utf-8") if isinstance(value, bytes) else value
