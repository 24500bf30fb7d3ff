"""Which columns a job reads, and whether the input has them: one that no record has is a wrong name, not so many broken rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import RowError, UserError, unknown_name
from engine.params import SamplingParams
from pipeline.config import InputSection
from pipeline.template import PromptTemplate, compile_template

MISSING = object()


@dataclass(frozen=True)
class Columns:
    """Where a record's parts are, and what holds for a row that does not say otherwise."""

    input: InputSection
    defaults: SamplingParams
    num_samples: int

    @property
    def template(self) -> PromptTemplate | None:
        return None if self.input.template is None else compile_template(self.input.template)

    def used_whole(self) -> set[str]:
        """The columns that need not be passed through."""
        section = self.input
        prompt = {section.prompt, section.messages} if self.template is None else self.template.whole
        return {name for name in {section.id, section.params, *prompt} if name is not None}

    def required(self) -> list[tuple[str, str]]:
        """(option, column) of the columns that must be there: those that were named, which the defaults were not."""
        section = self.input
        named = [(name, getattr(section, name)) for name in ("prompt", "messages", "id", "params")]
        required = [(f"input.{name}", path) for name, path in named if path is not None and path != getattr(InputSection, name)]
        return required + [("input.template", column) for column in (self.template.required if self.template else ())]

    def prompts(self) -> list[str]:
        """The columns of which each record must have one."""
        return [path for path in (self.input.prompt, self.input.messages) if path is not None and self.template is None]


class ColumnCheck:
    """Looks at files and records as they come by, and at the end says what none of them had.

    Args:
        path: of the only file whose records it sees, for the message.
    """

    def __init__(self, columns: Columns, path: str | None = None):
        self._where = "" if path is None else f"input file '{path}': "
        self._required = columns.required()
        self._prompts = columns.prompts()
        self._missing = self._required
        self._needs_prompt = bool(self._prompts)
        self._keys: list[str] = []

    def check_file(self, path: str, names: list[str]) -> None:
        """Raises UserError for a file that lacks a column; `names`: of the columns that it says it has."""
        repeated = [name for name in names if names.count(name) > 1]
        if repeated:
            raise UserError(f"input file '{path}' has the column '{repeated[0]}' {names.count(repeated[0])} times; allowed: once")
        columns = dict.fromkeys(names)
        for option, column in self._required:
            if not _may_have(columns, column):
                raise UserError(f"{option}: input file '{path}': {unknown_name('column', column, names)}")
        if self._prompts and not any(_may_have(columns, column) for column in self._prompts):
            raise UserError(f"input file '{path}': {unknown_name('column', self._prompts[0], names)}; {_ADVICE}")

    def look(self, record: dict | RowError) -> None:
        """Notes what a record has."""
        if isinstance(record, RowError) or not (self._needs_prompt or self._missing):
            return
        self._keys = self._keys or list(record)
        self._needs_prompt = self._needs_prompt and not any(has_column(record, column) for column in self._prompts)
        self._missing = [(option, column) for option, column in self._missing if not has_column(record, column)]

    def require(self) -> None:
        """Raises UserError, with the nearest key of the first record, for a column that no record had."""
        if not self._keys:  # no record could be read: each becomes an error row
            return
        for option, column in self._missing:
            raise UserError(f"{option}: {self._where}no record has it: {unknown_name('column', column, self._keys)}")
        if self._needs_prompt:
            raise UserError(f"{self._where}{unknown_name('column', self._prompts[0], self._keys)} in every record; {_ADVICE}")


_ADVICE = "set input.prompt, input.messages or input.template"


def lookup(record: Any, path: str) -> Any:
    """The value of a column, or of a path into one (`turns.0`, `conversation.0.text`); `MISSING` where there is none."""
    if isinstance(record, Mapping) and path in record:
        return record[path]
    for part in path.split("."):
        if isinstance(record, Mapping) and part in record:
            record = record[part]
        elif isinstance(record, list) and part.isdecimal() and int(part) < len(record):
            record = record[int(part)]
        else:
            return MISSING
    return record


def has_column(record: Mapping, path: str) -> bool:
    return lookup(record, path) is not MISSING


def _may_have(columns: Mapping, path: str) -> bool:
    """Whether the column is there, or one that the path may lead into."""
    return path in columns or path.split(".")[0] in columns
