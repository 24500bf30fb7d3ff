"""One input record -> the rows to generate: prompt or messages, id, parameters, samples, and what is passed through.

A record is a map from column to value, whatever file it came from. What is wrong with one becomes an error row.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import math
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from engine.errors import RowError
from engine.params import ROLES, SamplingParams
from pipeline.columns import MISSING, Columns, has_column, lookup

MAX_SAMPLES = 10_000

#: what a reader hands to the engine's workers; messages, params and meta are JSON
ROW_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("sample", pa.int32()),
        ("row_index", pa.int64()),
        ("prompt", pa.string()),
        ("messages", pa.string()),
        ("params", pa.string()),
        ("meta", pa.string()),
        ("error_type", pa.string()),
        ("error_message", pa.string()),
    ]
)


def read_key(record: Mapping | RowError, columns: Columns) -> tuple[str | None, int]:
    """The record's id, None where it gets its place, and its number of rows, as `expand_record` will make them."""
    if isinstance(record, RowError):
        return None, 1
    try:
        num_samples = _read_params(record, columns)[1]
    except RowError:
        num_samples = 1
    try:
        return _read_id(record, columns), num_samples
    except RowError:
        return None, num_samples


def expand_record(record: Mapping | RowError, *, row_index: int, place: str, columns: Columns) -> list[dict]:
    """The rows of one record, one per sample, adjacent. `place` is its file and line: the id of a record without one.

    A record that fails before its number of samples is known gives one row, with sample 0.
    """
    row = dict.fromkeys(ROW_SCHEMA.names)
    row.update(id=place, row_index=row_index)
    if isinstance(record, RowError):
        return [{**row, "sample": 0, **_error_fields(record, place)}]
    error, num_samples = None, 1
    try:
        params, num_samples = _read_params(record, columns)
        row["params"] = json.dumps(params) if params else None
    except RowError as problem:
        error = problem
    for name, read in (("id", _read_id), ("meta", _read_meta)):
        try:
            row[name] = read(record, columns) or row[name]
        except RowError as problem:
            error = error or problem
    try:
        row["prompt"], row["messages"] = _read_prompt(record, columns)
    except RowError as problem:
        error = error or problem
    if error is not None:
        row.update(_error_fields(error, place))
    return [{**row, "sample": sample} for sample in range(num_samples)]


def _get(record: Mapping, path: str | None) -> Any:
    if path in record:
        return record[path]
    if path is None or "." not in path:  # most records lack a column or two: no search for these
        return None
    value = lookup(record, path)
    return None if value is MISSING else value


def _error_fields(error: RowError, place: str) -> dict:
    return {"error_type": error.type, "error_message": f"{place}: {_as_utf8(error.message)}"}


def _read_id(record: Mapping, columns: Columns) -> str | None:
    value = _get(record, columns.input.id)
    if value is None:
        return None
    if isinstance(value, str) and value:
        return _require_utf8(value, columns.input.id)
    if isinstance(value, int | uuid.UUID) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, decimal.Decimal) and value.is_finite() and value == value.to_integral_value():  # as databases export integers
        return str(int(value))
    raise RowError("bad_record", f"{columns.input.id}={_show(value)}; allowed: an integer or non-empty text")


def _read_params(record: Mapping, columns: Columns) -> tuple[dict, int]:
    """The row's own sampling parameters, checked, and its number of samples."""
    value = _get(record, columns.input.params)
    if value is None or _is_blank(value):  # as an empty cell in CSV
        return {}, columns.num_samples
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowError("bad_params", f"{columns.input.params}={_show(value)} is not JSON: {error}") from None
    if value is None:
        return {}, columns.num_samples
    if not isinstance(value, Mapping):
        raise RowError("bad_params", f"{columns.input.params}={_show(value)}; allowed: an object of sampling parameters")
    params = {name: item for name, item in value.items() if item is not None}  # null: the job's value
    num_samples = params.pop("n", columns.num_samples)
    if not isinstance(num_samples, int) or isinstance(num_samples, bool) or not 1 <= num_samples <= MAX_SAMPLES:
        raise RowError("bad_params", f"n={_show(num_samples)}; allowed: an integer from 1 to {MAX_SAMPLES}")
    if isinstance(params.get("logit_bias"), Mapping):  # Parquet fills absent keys with null
        params["logit_bias"] = {token: bias for token, bias in params["logit_bias"].items() if bias is not None}
    if params:
        SamplingParams.from_mapping(params, columns.defaults)
    return params, num_samples


def _read_prompt(record: Mapping, columns: Columns) -> tuple[str | None, str | None]:
    """(prompt, None) or (None, messages as JSON)."""
    if columns.template is not None:
        return _check_prompt(columns.template.render(record), "the prompt from input.template"), None
    names = columns.input
    prompt, messages = _get(record, names.prompt), _get(record, names.messages)
    if _is_blank(messages) and prompt is not None:  # as an empty cell in CSV
        messages = None
    if messages is None:
        if prompt is None:
            raise RowError("bad_record", _describe_missing(record, columns.prompts()))
        return _check_prompt(prompt, names.prompt), None
    if prompt is not None and not _is_blank(prompt):
        raise RowError("bad_record", f"has both {names.prompt} and {names.messages}; set one of input.prompt, input.messages to null")
    try:
        return None, json.dumps(_read_messages(messages, names.messages))
    except RecursionError:
        raise RowError("bad_record", f"{names.messages} is nested too deeply") from None


def _describe_missing(record: Mapping, wanted: list[str]) -> str:
    null = [name for name in wanted if has_column(record, name)]
    return f"{null[0]} is null" if null else f"has no {' and no '.join(wanted)}; its keys: {_show(list(record))}"


def _check_prompt(prompt: Any, name: str) -> str:
    if isinstance(prompt, bytes):
        try:
            prompt = prompt.decode("utf-8")
        except UnicodeDecodeError as error:
            raise RowError("bad_record", f"{name} is not UTF-8: {error.reason} at byte {error.start}") from None
    if not isinstance(prompt, str):
        raise RowError("bad_record", f"{name}={_show(prompt)} is {_kind(prompt)}; allowed: text")
    if _is_blank(prompt):
        raise RowError("empty_prompt", f"{name} is empty or blank")
    return _require_utf8(prompt, name)


def _is_blank(value: Any) -> bool:
    return isinstance(value, str) and not value.strip()


def _read_messages(value: Any, name: str) -> list[dict]:
    if _is_blank(value):
        raise RowError("empty_prompt", f"{name} is empty or blank")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowError("bad_record", f"{name} is text and not JSON: {error}") from None
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise RowError("bad_record", f"{name}={_show(value)} is {_kind(value)}; allowed: a list of messages")
    if not value:
        raise RowError("empty_prompt", f"{name} is an empty list")
    messages = []
    for index, message in enumerate(value):
        where = f"{name}[{index}]"
        if not isinstance(message, Mapping):
            raise RowError("bad_record", f"{where}={_show(message)} is {_kind(message)}; allowed: an object")
        message = {key: item for key, item in message.items() if item is not None}  # Parquet fills absent keys with null
        if message.get("role") not in ROLES:
            raise RowError("bad_record", f"{where}.role={_show(message.get('role'))}; allowed: {', '.join(ROLES)}")
        if not isinstance(message.get("content", "" if "tool_calls" in message else None), str):
            content = message.get("content")
            raise RowError("bad_record", f"{where}.content={_show(content)} is {_kind(content)}; allowed: text")
        _require_utf8(message.get("content", ""), where)
        messages.append(_plain(message))
    if not any(message.get("content", "").strip() for message in messages):
        raise RowError("empty_prompt", f"{name} has no content that is not blank")
    return messages


def _read_meta(record: Mapping, columns: Columns) -> str | None:
    """The columns that are not used whole, as JSON. Reversible: see `_plain`."""
    used = columns.used_whole()
    rest = {name: value for name, value in record.items() if name not in used}
    if not rest:
        return None
    try:
        plain = _plain(rest)
        text = json.dumps(plain, ensure_ascii=False)
    except RecursionError:
        raise RowError("bad_record", "is nested too deeply") from None
    return text if _is_utf8(text) else json.dumps(plain)  # lone surrogates: only their escapes are UTF-8


def _plain(value: Any) -> Any:
    """What JSON can hold: bytes as base64, decimals and times as text, NaN and infinities as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return str(value)  # decimals, durations, UUIDs


def _is_utf8(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _as_utf8(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _require_utf8(text: str, name: str) -> str:
    if not _is_utf8(text):
        raise RowError("bad_record", f"{name} holds a lone surrogate, which is no character")
    return text


def _show(value: Any, most: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def _kind(value: Any) -> str:
    names = {type(None): "null", dict: "an object", list: "a list", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), f"a {type(value).__name__}")
