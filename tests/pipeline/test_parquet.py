"""Parquet as people have it: nulls, odd types, empty row groups, damaged pages."""

import json
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.errors import UserError
from pipeline.input_file import InputFile
from pipeline.parquet import read_records
from tests.pipeline.conftest import read_input as read


def write(tmp_path, table: pa.Table, **options):
    pq.write_table(table, tmp_path / "in.parquet", **options)
    return tmp_path / "in.parquet"


def test_text_that_is_not_utf8_ends_only_its_row(tmp_path):
    values = pa.array([b"good", b"\xff", b"fine"])
    path = write(tmp_path, pa.table({"prompt": pa.Array.from_buffers(pa.string(), 3, values.buffers())}))
    _, rows = read(path)
    assert [row["prompt"] for row in rows] == ["good", None, "fine"]
    assert rows[1]["error_message"].startswith("in.parquet:2: prompt cannot be read: 'utf-8' codec can't decode byte 0xff")


def test_binary_large_and_dictionary_columns_hold_text(tmp_path):
    columns = {"id": pa.array(["a", "b"], pa.large_string()), "prompt": pa.array([b"x", b"\xff"]), "kind": pa.array(["k", "k"])}
    columns["kind"] = columns["kind"].dictionary_encode()
    _, rows = read(write(tmp_path, pa.table(columns)))
    assert [(row["id"], row["prompt"], row["error_type"]) for row in rows] == [("a", "x", None), ("b", None, "bad_record")]
    assert json.loads(rows[0]["meta"]) == {"kind": "k"}


@pytest.mark.parametrize(
    ("values", "messages"),
    [
        (pa.array([1.5, None, float("nan")]), ["prompt=1.5 is a number", "prompt is null", "prompt=nan is a number"]),
        (pa.array(["", " ", None]), ["prompt is empty or blank", "prompt is empty or blank", "prompt is null"]),
        (pa.array([["a"], [], None]), ["prompt=['a'] is a list", "prompt=[] is a list", "prompt is null"]),
        (pa.array([2**62] * 3, pa.timestamp("us")), ["prompt cannot be read: date value out of range"] * 3),
    ],
)
def test_wrong_prompts_are_error_rows(tmp_path, values, messages):
    _, rows = read(write(tmp_path, pa.table({"id": [1, 2, 3], "prompt": values})))
    assert len(rows) == 3
    for number, (row, message) in enumerate(zip(rows, messages, strict=True), start=1):
        assert row["error_message"].startswith(f"in.parquet:{number}: {message}")


def test_messages_with_nulls(tmp_path):
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("name", pa.string())]))
    chats = [[{"role": "user", "content": "hi", "name": None}], None, [], [{"role": "user", "content": None}], [None]]
    _, rows = read(write(tmp_path, pa.table({"messages": pa.array(chats, kind)})))
    assert [row["error_type"] for row in rows] == [None, "bad_record", "empty_prompt", "bad_record", "bad_record"]
    assert json.loads(rows[0]["messages"]) == [{"role": "user", "content": "hi"}]


def test_empty_row_groups_are_passed_over(tmp_path):
    schema = pa.schema([("prompt", pa.string())])
    with pq.ParquetWriter(tmp_path / "in.parquet", schema) as writer:
        for prompts in ([], ["a", "b"], [], ["c"]):
            writer.write_table(pa.table({"prompt": prompts}, schema=schema))
    plan, rows = read(tmp_path / "in.parquet")
    assert [(row["id"], row["prompt"]) for row in rows] == [("in.parquet:1", "a"), ("in.parquet:2", "b"), ("in.parquet:3", "c")]
    assert [(chunk.offset, chunk.start) for chunk in plan.chunks] == [(1, 1), (3, 3)]


def test_a_row_group_is_read_in_pieces(tmp_path):
    path = write(tmp_path, pa.table({"prompt": [f"{i} " + "x" * 1000 for i in range(20_000)]}), use_dictionary=False, compression=None)
    file = InputFile(str(path), path.name, "parquet")
    pool = pa.default_memory_pool()
    before = pool.bytes_allocated()
    peak = max(pool.bytes_allocated() for _ in zip(range(5000), read_records(file), strict=False))
    assert peak - before < path.stat().st_size / 2


def test_a_damaged_page_is_found_before_anything_starts(tmp_path):
    path = write(
        tmp_path, pa.table({"prompt": ["x"] * 9, "note": [f"{i:99}" for i in range(9)]}), compression=None, write_page_checksum=True
    )
    content = path.read_bytes()
    at = content.index(b" " * 40)
    path.write_bytes(content[:at] + b"!" + content[at + 1 :])
    with pytest.raises(UserError, match="CRC"):
        read(path)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pa.table({"prompt": pa.array([], pa.string())}), "has no records"),
        (pa.table({"text": pa.array([], pa.string())}), "unknown column 'prompt' .allowed: text"),
        (pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"]), "has the column 'prompt' 2 times"),
    ],
)
def test_files_that_are_refused(tmp_path, table, message):
    with pytest.raises(UserError, match=message):
        read(write(tmp_path, table))


def test_a_file_that_is_cut_short_is_refused(tmp_path):
    path = write(tmp_path, pa.table({"prompt": ["x"] * 1000}))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"in.parquet' is not readable Parquet"):
        read(path)


def test_a_time_zone_that_is_unknown_costs_rows_not_the_file(tmp_path):
    for unit in ("us", "ns"):
        times = pa.array([1, None], pa.timestamp(unit, "Foo/Bar"))
        _, rows = read(write(tmp_path, pa.table({"prompt": ["a", "b"], "at": times})))
        assert [row["error_type"] for row in rows] == ["bad_record", None], unit
        assert "at cannot be read" in rows[0]["error_message"]


def test_a_duration_is_told_with_its_unit(tmp_path):
    _, rows = read(write(tmp_path, pa.table({"prompt": ["a"], "took": pa.array([1_500_000_000], pa.duration("ns"))})))
    assert json.loads(rows[0]["meta"]) == {"took": "1500000000 ns"}


def test_wide_rows_are_read_a_few_at_a_time(tmp_path):
    path = write(tmp_path, pa.table({"prompt": [f"{i}" for i in range(60)], "image": [bytes([i]) * (1 << 20) for i in range(60)]}))
    tracemalloc.start()
    assert sum(1 for _ in read_records(InputFile(str(path), path.name, "parquet"))) == 60
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 << 20  # 60 MiB in all
