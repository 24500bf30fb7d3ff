import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.errors import UserError
from engine.params import SamplingParams
from pipeline import sources
from pipeline.config import InputSection
from pipeline.records import Columns
from pipeline.sources import find_files, read_chunk, scan_input
from tests.pipeline.conftest import write_jsonl


def read(path, num_samples=1, format="auto", **section):
    """The plan, and the rows that its chunks give."""
    columns = Columns(InputSection(path=str(path), **section), SamplingParams(), num_samples)
    plan = scan_input(str(path), format, columns)
    rows = [row for chunk in plan.chunks for table in read_chunk(chunk, columns) for row in table.to_pylist()]
    assert len(rows) == plan.num_rows
    assert sorted({row["row_index"] for row in rows}) == list(range(plan.num_records))
    return plan, rows


def test_lines_end_at_newline_only_and_blank_ones_are_skipped(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes('\ufeff{"prompt": "a\u2028b\u0085"}\r\n\n  \n{"prompt": "c"}'.encode())
    _, rows = read(path)
    assert [(row["id"], row["row_index"], row["prompt"]) for row in rows] == [("in.jsonl:1", 0, "a\u2028b\u0085"), ("in.jsonl:4", 1, "c")]


def test_bad_lines_become_error_rows_with_their_place(tmp_path):
    path = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}, "{", b'{"prompt": "\xff"}', "[1]", "9" * 5000, {"prompt": "b"}])
    _, rows = read(path, num_samples=2)
    assert [row["error_type"] for row in rows] == [None, None, *["bad_record"] * 4, None, None]
    assert rows[2]["error_message"].startswith("in.jsonl:2: invalid JSON")
    assert rows[3]["error_message"].startswith("in.jsonl:3: invalid UTF-8")
    assert rows[4]["error_message"] == "in.jsonl:4: the line holds a list; allowed: an object"


def test_chunks_number_the_rows_as_one_pass_does(tmp_path, monkeypatch):
    records = [{"prompt": f"p{i}"} if i % 5 else "" for i in range(100)]
    for name in ("b.jsonl", "a.jsonl"):
        write_jsonl(tmp_path / name, records)
    with gzip.open(tmp_path / "c.jsonl.gz", "wb") as file:
        file.write((tmp_path / "a.jsonl").read_bytes())
    _, whole = read(tmp_path)
    monkeypatch.setattr(sources, "_CHUNK_RECORDS", 7)
    plan, rows = read(tmp_path)
    assert len(plan.chunks) == 12 + 12 + 1  # a gzip stream is one chunk
    assert rows == whole
    assert [row["id"] for row in rows[:2]] == ["a.jsonl:2", "a.jsonl:3"]
    assert [f.name for f in plan.files] == ["a.jsonl", "b.jsonl", "c.jsonl.gz"]


@pytest.mark.parametrize("limit", [1, 6, 7, 8, 14, 30])
def test_limit_takes_the_first_records(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(sources, "_CHUNK_RECORDS", 7)
    for name in ("a.jsonl", "b.jsonl"):
        write_jsonl(tmp_path / name, [{"prompt": f"{name}{i}"} for i in range(15)])
    _, every = read(tmp_path)
    _, rows = read(tmp_path, limit=limit)
    assert rows == every[:limit]


def test_parquet_rows(tmp_path):
    prompts = pa.array([f"p{i}" for i in range(9)] + [None], pa.string()).dictionary_encode()
    times = pa.array(range(10), pa.timestamp("ns"))
    params = [{"temperature": 0.5, "seed": None}] + [None] * 9
    table = pa.table({"id": range(10), "prompt": prompts, "time": times, "params": params})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=4)
    plan, rows = read(tmp_path / "in.parquet")
    assert len(plan.chunks) == 3
    assert [row["id"] for row in rows] == [str(i) for i in range(10)]
    assert [row["prompt"] for row in rows][:9] == [f"p{i}" for i in range(9)]
    assert rows[9]["error_message"] == "in.parquet:10: prompt is null"
    assert json.loads(rows[0]["params"]) == {"temperature": 0.5}
    assert json.loads(rows[1]["meta"]) == {"time": "1970-01-01 00:00:00.000000001"}
    _, limited = read(tmp_path / "in.parquet", limit=5)
    assert limited == rows[:5]


def test_a_folder_in_sorted_order_and_what_is_left_out(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.jsonl", "sub/a.ndjson", "_note.jsonl", "README.md"):
        write_jsonl(tmp_path / name, [{"prompt": name}])
    plan, rows = read(tmp_path)
    assert [row["id"] for row in rows] == ["b.jsonl:1", "sub/a.ndjson:1"]
    assert sorted(plan.ignored) == ["README.md", "_note.jsonl"]
    assert read(tmp_path / "*" / "*.ndjson")[1][0]["id"] == "sub/a.ndjson:1"
    assert read(tmp_path / "README.md", format="jsonl")[1][0]["prompt"] == "README.md"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no records"),
        (b"\n \n", "has no records"),
        ('{"prompt": "x"}\n'.encode("utf-16"), "is UTF-16"),
        (b'[\n{"prompt": "x"}\n]', "one JSON array"),
        (b'{"prompt": "x", "id": 1}\n{"prompt": "y", "id": "1"}\n', r"repeated ids in column 'id': '1' \(in.jsonl:1 and in.jsonl:2\)"),
        (b'{"promt": "x"}\n{"promt": "y"}\n', "did you mean 'promt'"),
    ],
)
def test_inputs_that_are_refused_up_front(tmp_path, content, message):
    (tmp_path / "in.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(tmp_path / "in.jsonl")


def test_a_named_column_must_be_there(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", [{"prompt": "x", "uid": 1}])
    with pytest.raises(UserError, match=r"input.id: .*did you mean 'uid'"):
        read(tmp_path / "in.jsonl", id="uidd")
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "in.parquet")
    with pytest.raises(UserError, match=r"unknown column 'prompt' .allowed: text"):
        read(tmp_path / "in.parquet")


@pytest.mark.parametrize(
    ("name", "content"), [("a.jsonl.gz", b"plain"), ("b.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 999)[:30]), ("c.parquet", b"PAR1")]
)
def test_broken_files_are_refused_by_name(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=name):
        read(tmp_path / name)


def test_no_file_at_all(tmp_path):
    with pytest.raises(UserError, match="matches no file"):
        find_files(str(tmp_path / "nope*"), "auto")
    (tmp_path / "a.csv").write_text("prompt\nx\n")
    with pytest.raises(UserError, match="csv and text are not built yet"):
        find_files(str(tmp_path), "auto")
