"""Given answers in place of the target's own: the same columns in parts of the same names, made once for an input that stays as it is."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from engine.errors import RowError, UserError
from engine.models.loading import load_tokenizer
from engine.models.source import ResolvedTarget
from engine.prompting import prepare_row
from jobs.train_draft.config import TrainDraftConfig
from pipeline.checks import check_sampling, find_input
from pipeline.columns import Columns, lookup
from pipeline.config import JobConfig
from pipeline.generate import RowOptions, make_request
from pipeline.input_file import InputFile
from pipeline.notes import tell
from pipeline.parts import part_name
from pipeline.schema import SCHEMA
from pipeline.sources import read_chunk, scan_input
from pipeline.wording import count

_COLUMNS = ("id", "sample", "status", "prompt", "num_prompt_tokens", "token_ids")
_PROBLEMS = 3
_DONE = "given.json"


def write_given(config: TrainDraftConfig, job: JobConfig, target: ResolvedTarget, *, vocab_size: int) -> None:
    """Writes the parts of the job's output, unless they are there.

    Raises UserError when no record has an answer that can be used, and for an input that is not that of the parts.
    """
    out = Path(job.output.path)
    (out / "rows").mkdir(parents=True, exist_ok=True)
    files, _ = find_input(job, [])
    contents = {file.name: file.content_hash() for file in files}
    if (out / _DONE).exists():
        _require_same(json.loads((out / _DONE).read_text()), contents, out)
        return
    reader = _Reader(config, job, target, vocab_size, files)
    number, rows = 0, []
    for row in reader.rows():
        rows.append(row)
        if len(rows) == job.output.rows_per_file:
            _write(out / part_name(number), rows)
            number, rows = number + 1, []
    if rows:
        _write(out / part_name(number), rows)
    problems = "; ".join(reader.problems)
    if not number and not rows:
        raise UserError(f"answers.given='{config.answers.given}': no record can be used: {problems}")
    if reader.num_left_out:
        tell(f"answers: {count(reader.num_left_out, 'record')} left out: {problems}")
    (out / _DONE).write_text(json.dumps(contents) + "\n")


def _require_same(before: Mapping[str, str], contents: Mapping[str, str], out: Path) -> None:
    for name in sorted({*before, *contents}):
        if before.get(name) != contents.get(name):
            raise UserError(
                f"input file '{name}' is not as it was when '{out}' was made of it; allowed: the same input, or another output.path"
            )


def _write(path: Path, rows: list[dict]) -> None:
    staged = path.with_suffix(".staged")
    pq.write_table(pa.Table.from_pylist(rows, schema=pa.schema([SCHEMA.field(name) for name in _COLUMNS])), staged)
    os.replace(staged, path)


class _Reader:
    def __init__(self, config: TrainDraftConfig, job: JobConfig, target: ResolvedTarget, vocab_size: int, files: list[InputFile]):
        self.problems: list[str] = []  # the first ones
        self.num_left_out = 0
        self._column = config.answers.given
        self._defaults = check_sampling(job.sampling)
        self._columns = Columns(job.input, self._defaults, 1)
        self._files = files
        self._options = RowOptions(defaults=self._defaults, input=job.input, seed=0)
        self._tokenizer = load_tokenizer(target.path, target.chat_template)
        self._vocab_size = vocab_size
        self._max_tokens = config.answers.max_tokens

    def rows(self) -> Iterator[dict[str, Any]]:
        for chunk in scan_input(self._files, self._columns).chunks:
            for table in read_chunk(chunk, self._columns):
                for row in table.to_pylist():
                    try:
                        yield self._read(row)
                    except RowError as error:
                        self.num_left_out += 1
                        if len(self.problems) < _PROBLEMS:
                            self.problems.append(f"{row['id']}: {error.message}")

    def _read(self, row: dict[str, Any]) -> dict[str, Any]:
        answer, row = _take_answer(row, self._column, self._columns.input.messages)
        request = make_request(row, self._options, has_chat_template=bool(self._tokenizer.chat_template))
        prepared = prepare_row(
            request, tokenizer=self._tokenizer, vocab_size=self._vocab_size, max_model_len=self._max_tokens, eos_ids=(), engine_seed=0
        )
        values = (row["id"], 0, "ok", prepared.prompt, prepared.num_prompt_tokens, self._encode(answer))
        return dict(zip(_COLUMNS, values, strict=True))

    def _encode(self, answer: str | list) -> list[int]:
        """Token ids are taken as they are; a text ends with EOS."""
        if isinstance(answer, str):
            end = [] if self._tokenizer.eos_token_id is None else [self._tokenizer.eos_token_id]
            return [*self._tokenizer(answer, add_special_tokens=False, verbose=False).input_ids, *end]
        for token in answer:
            if type(token) is not int or not 0 <= token < self._vocab_size:
                raise RowError("bad_record", f"token id {token!r} in {self._column}; allowed: 0 to {self._vocab_size - 1}")
        return answer


def _take_answer(row: Mapping[str, Any], column: str, messages_column: str | None) -> tuple[str | list, dict[str, Any]]:
    """The answer's text or token ids, and the row without it."""
    if column == messages_column:
        *before, last = json.loads(row["messages"] or "[]") or [{}]
        if last.get("role") != "assistant" or not last.get("content") or not before:
            raise RowError("bad_record", f"the last of {column} is no message of the assistant's behind others")
        return last["content"], {**row, "messages": json.dumps(before)}
    answer = lookup(json.loads(row["meta"] or "{}"), column)
    if not isinstance(answer, str | list) or not answer:
        raise RowError("bad_record", f"has no text and no token ids in {column}")
    return answer, dict(row)
