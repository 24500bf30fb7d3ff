import datetime
import decimal
import json
import uuid

import pytest

from engine.errors import RowError
from engine.params import SamplingParams
from pipeline.columns import Columns
from pipeline.config import InputSection
from pipeline.records import MAX_SAMPLES, expand_record, read_key

PLACE = "in.jsonl:7"


def expand(record, num_samples=1, **section):
    columns = Columns(InputSection(path="in", **section), SamplingParams(max_tokens=16), num_samples)
    rows = expand_record(record, row_index=3, place=PLACE, columns=columns)
    id, num_rows = read_key(record, columns)  # the driver counts what the readers make
    assert (id or PLACE, num_rows) == (rows[0]["id"], len(rows))
    return rows


def test_a_prompt_with_its_passthrough_columns():
    (row,) = expand({"id": "a", "prompt": "hello", "topic": "sea", "tags": [1, None]})
    assert (row["id"], row["prompt"]) == ("a", "hello")
    assert (row["row_index"], row["sample"], row["error_type"]) == (3, 0, None)
    assert json.loads(row["meta"]) == {"topic": "sea", "tags": [1, None]}


def test_ids():
    assert expand({"prompt": "x"})[0]["id"] == PLACE
    assert expand({"id": None, "prompt": "x"})[0]["id"] == PLACE
    assert expand({"id": 12, "prompt": "x"})[0]["id"] == "12"
    assert expand({"id": "b", "prompt": "x"}, id=None)[0]["id"] == PLACE
    assert expand({"key": {"id": "c"}, "prompt": "x"}, id="key.id")[0]["id"] == "c"
    assert expand({"key": {}, "prompt": "x"}, id="key.id")[0]["id"] == PLACE
    for bad in (1.5, True, "", [1], {}, "\ud800"):
        (row,) = expand({"id": bad, "prompt": "x"})
        assert (row["id"], row["error_type"]) == (PLACE, "bad_record")


@pytest.mark.parametrize(
    ("record", "error", "message"),
    [
        ({"prompt": None}, "bad_record", "prompt is null"),
        ({"text": "x"}, "bad_record", "no prompt and no messages"),
        ({"prompt": ""}, "empty_prompt", "empty or blank"),
        ({"prompt": " \n"}, "empty_prompt", "empty or blank"),
        ({"prompt": 5}, "bad_record", "is a number; allowed: text"),
        ({"prompt": ["x"]}, "bad_record", "is a list; allowed: text"),
        ({"prompt": b"\xff"}, "bad_record", "not UTF-8"),
        ({"prompt": "\ud800"}, "bad_record", "lone surrogate"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "bad_record", "both prompt and messages"),
        ({"messages": []}, "empty_prompt", "empty list"),
        ({"messages": "hello"}, "bad_record", "not JSON"),
        ({"messages": " "}, "empty_prompt", "messages is empty or blank"),
        ({"prompt": "", "messages": ""}, "empty_prompt", "prompt is empty or blank"),
        ({"messages": [{"role": "usr", "content": "x"}]}, "bad_record", "messages[0].role='usr'; allowed: system"),
        ({"messages": [{"role": "user"}]}, "bad_record", "messages[0].content"),
        ({"messages": [{"role": "user", "content": " "}]}, "empty_prompt", "not blank"),
        ({"messages": ["x"]}, "bad_record", "messages[0]"),
        ({"prompt": "x", "params": "{"}, "bad_params", "not JSON"),
        ({"prompt": "x", "params": [1]}, "bad_params", "an object of sampling parameters"),
        ({"prompt": "x", "params": {"temprature": 1}}, "bad_params", "did you mean 'temperature'"),
        ({"prompt": "x", "params": {"temperature": -1}}, "bad_params", "temperature=-1"),
        ({"prompt": "x", "params": {"n": 0}}, "bad_params", f"1 to {MAX_SAMPLES}"),
        ({"prompt": "x", "params": {"n": 10**9}}, "bad_params", f"1 to {MAX_SAMPLES}"),
    ],
)
def test_what_is_wrong_with_a_record_is_said_with_its_place(record, error, message):
    (row,) = expand(record)
    assert row["error_type"] == error
    assert row["error_message"].startswith(PLACE + ": ")
    assert message in row["error_message"]


def test_messages():
    messages = [{"role": "user", "content": "hi", "name": None}, {"role": "assistant", "content": "ho"}]
    (row,) = expand({"messages": messages})
    assert json.loads(row["messages"]) == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    assert expand({"messages": json.dumps(messages)})[0]["messages"] == row["messages"]


def test_a_path_into_a_column_leaves_the_column_in_meta():
    (row,) = expand({"turns": ["first", "second"]}, prompt="turns.0")
    assert row["prompt"] == "first"
    assert json.loads(row["meta"]) == {"turns": ["first", "second"]}
    assert expand({"turns": []}, prompt="turns.0")[0]["error_type"] == "bad_record"
    assert expand({"a.b": "dotted name"}, prompt="a.b")[0]["prompt"] == "dotted name"


def test_an_empty_cell_is_nothing_beside_one_that_is_not():
    """CSV has no null."""
    chat = json.dumps([{"role": "user", "content": "hi"}])
    assert expand({"prompt": "", "messages": chat})[0]["messages"] == chat
    assert expand({"prompt": "x", "messages": ""})[0]["prompt"] == "x"
    assert expand({"prompt": "x", "params": " "})[0]["error_type"] is None


@pytest.mark.parametrize(
    ("record", "prompt", "error"),
    [
        ({"doc": {"title": "T", "url": "u"}, "text": "x"}, "T: x", None),
        ({"doc": {"title": "T"}, "text": None}, None, "template_error"),
        ({"text": "x"}, None, "template_error"),
        ({"doc": {"title": ""}, "text": "\ud800"}, None, "bad_record"),
    ],
)
def test_a_template_makes_the_prompt(record, prompt, error):
    (row,) = expand({**record, "prompt": "unused", "messages": 5}, template="{{ doc.title }}: {{ text }}")
    assert (row["prompt"], row["messages"], row["error_type"]) == (prompt, None, error)
    rest = {name: value for name, value in record.items() if name == "doc"}  # only looked into, so passed on
    assert json.loads(row["meta"]) == {**rest, "prompt": "unused", "messages": 5}


def test_a_template_that_gives_nothing():
    (row,) = expand({"text": " ", "params": {"n": 1}}, template="{{ text }}")
    assert (row["error_type"], row["meta"]) == ("empty_prompt", None)
    rows = expand({"text": None}, num_samples=3, template="{{ text }}")
    assert [(row["sample"], row["error_type"]) for row in rows] == [(s, "template_error") for s in range(3)]


def test_samples_are_adjacent_and_a_row_may_ask_for_its_own_number():
    assert [row["sample"] for row in expand({"prompt": "x"}, num_samples=3)] == [0, 1, 2]
    rows = expand({"prompt": "x", "params": {"n": 2, "temperature": 0.5, "top_p": None}}, num_samples=3)
    assert [row["sample"] for row in rows] == [0, 1]
    assert json.loads(rows[0]["params"]) == {"temperature": 0.5}


def test_errors_before_and_after_the_number_of_samples_is_known():
    assert len(expand(RowError("bad_record", "invalid JSON"), num_samples=4)) == 1
    assert len(expand({"prompt": "x", "params": "{"}, num_samples=4)) == 1
    rows = expand({"prompt": ""}, num_samples=4)
    assert [row["error_type"] for row in rows] == ["empty_prompt"] * 4


def test_meta_is_json_whatever_the_columns_hold():
    values = {
        "bytes": b"\x00\xff",
        "decimal": decimal.Decimal("1.10"),
        "time": datetime.datetime(2026, 1, 2, 3, 4, 5),
        "nan": float("nan"),
        "low": [float("-inf")],
    }
    (row,) = expand({"prompt": "x", **values})
    assert json.loads(row["meta"], parse_constant=pytest.fail) == {
        "bytes": "AP8=",
        "decimal": "1.10",
        "time": "2026-01-02T03:04:05",
        "nan": "NaN",
        "low": ["-Infinity"],
    }
    (row,) = expand({"prompt": "x", "broken": "\ud800"})
    assert row["meta"].encode("utf-8") == rb'{"broken": "\ud800"}'


def test_whatever_is_wrong_with_a_record_the_driver_counts_the_rows_that_the_readers_make():
    for record in ({"id": 1.5, "prompt": "x"}, {"id": True}, {"prompt": None}, {"prompt": "x", "params": {"n": 0}}, {"id": "\ud800"}):
        expand(record, num_samples=3)


def test_nesting_without_end_costs_one_row():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    (row,) = expand({"messages": [{"role": "user", "content": "hi", "x": deep}]})
    assert (row["error_type"], "messages is nested too deeply" in row["error_message"]) == ("bad_record", True)
    (row,) = expand({"prompt": "hi", "x": deep})
    assert (row["error_type"], "is nested too deeply" in row["error_message"]) == ("bad_record", True)


def test_ids_as_databases_export_them():
    key = uuid.UUID(int=7)
    assert expand({"id": key, "prompt": "x", "other": [key]})[0]["id"] == str(key)
    assert json.loads(expand({"prompt": "x", "other": [key]})[0]["meta"]) == {"other": [str(key)]}
    assert expand({"id": decimal.Decimal("12"), "prompt": "x"})[0]["id"] == "12"
    assert expand({"id": decimal.Decimal("1.5"), "prompt": "x"})[0]["error_type"] == "bad_record"


def test_nulls_that_parquet_fills_in_are_no_biases():
    (row,) = expand({"prompt": "x", "params": {"logit_bias": {"5": 1.0, "7": None}}})
    assert (row["error_type"], json.loads(row["params"])) == (None, {"logit_bias": {"5": 1.0}})
