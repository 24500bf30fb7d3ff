"""The step between reading and writing, run in an actor: a table of rows in, one table of results out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from engine.errors import RowError
from engine.params import Request, Result, SamplingParams
from pipeline.config import InputSection
from pipeline.schema import make_record, make_table

#: of the schema of a table of results: what made it (see `workers.generator.describe_engine`), as JSON
ENGINE = b"rheo.engine"


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """How rows become requests. input: its chat, template_kwargs, system, truncate and parse_special. seed: of a row without its own."""

    defaults: SamplingParams
    input: InputSection
    seed: int


class GenerateRows:
    """The actor's class. Calls run in many threads at once and share one engine.

    One table of the fixed schema comes back per call: with more than one, a Ray retry loses and doubles rows. Rows that are not begun
    because the job is being stopped are missing from it.

    Args:
        settings: a workers.generator.EngineSettings.
        ledger: the Ray actor that workers report to.
    """

    def __init__(self, settings, ledger, options: RowOptions):
        from workers.generator import Generator

        self._generator = Generator(settings, ledger)
        self._options = options

    def __call__(self, table: pa.Table) -> pa.Table:
        rows = table.to_pylist()
        results: list[Result | None] = [None] * len(rows)
        requests: dict[int, Request] = {}
        for place, row in enumerate(rows):
            try:
                requests[place] = make_request(row, self._options, has_chat_template=self._generator.has_chat_template)
            except RowError as error:
                results[place] = self._refused(row, error)
        refused = [_key(row) for row, result in zip(rows, results, strict=True) if result is not None]
        if refused:
            self._generator.count_errors(refused)
        keys = [_key(rows[place]) for place in requests]
        for place, result in zip(requests, self._generator.generate(list(requests.values()), keys), strict=True):
            results[place] = result
            if result is not None and result.prompt is None:  # refused before it was templated
                result.prompt = rows[place]["prompt"]
        table = make_table(
            [
                make_record(
                    result,
                    row_index=row["row_index"],
                    meta=row["meta"],
                    worker=self._generator.name,
                    depth=self._generator.depth,
                )
                for row, result in zip(rows, results, strict=True)
                if result is not None
            ]
        )
        return table.replace_schema_metadata({ENGINE: json.dumps(self._generator.description)})

    def _refused(self, row: Mapping[str, Any], error: RowError) -> Result:
        seed = json.loads(row["params"] or "{}").get("seed", self._options.seed)
        return Result.failed(row["id"], row["sample"], error, prompt=row["prompt"], seed=seed)


def _key(row: Mapping[str, Any]) -> tuple[int, int]:
    return row["row_index"], row["sample"]


def make_request(row: Mapping[str, Any], options: RowOptions, *, has_chat_template: bool) -> Request:
    """The engine's request for one row of `ROW_SCHEMA`. Raises the row's own RowError, or one for a missing chat template."""
    if row["error_type"] is not None:
        raise RowError(row["error_type"], row["error_message"])
    params = SamplingParams.from_mapping(json.loads(row["params"] or "{}"), options.defaults)
    section = options.input
    messages: Sequence[Mapping[str, Any]] | None = None
    if row["messages"] is not None:
        messages = json.loads(row["messages"])
    elif section.chat is True or (section.chat == "auto" and has_chat_template):
        messages = [{"role": "user", "content": row["prompt"]}]
    for option, is_set in (("system", section.system is not None), ("template_kwargs", bool(section.template_kwargs))):
        if is_set and messages is None:
            raise RowError("template_error", f"input.{option} is set, but the prompt is raw text: the tokenizer has no chat template")
    if section.system is not None and messages[0]["role"] not in ("system", "developer"):
        messages = [{"role": "system", "content": section.system}, *messages]
    if messages is not None and not has_chat_template:
        raise RowError("template_error", "the tokenizer has no chat template; allowed: input.prompt with input.chat=false")
    return Request(
        id=row["id"],
        sample=row["sample"],
        prompt=row["prompt"] if messages is None else None,
        messages=messages,
        params=params,
        template_kwargs=section.template_kwargs,
        truncate=section.truncate,
        parse_special=section.parse_special,
    )
