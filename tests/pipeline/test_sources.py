import dataclasses
import gzip
import json
import pickle
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.errors import UserError
from engine.params import SamplingParams
from pipeline import repeated_ids, sources
from pipeline.columns import Columns
from pipeline.config import InputSection
from pipeline.done import DoneSet
from pipeline.files import find_files
from pipeline.input_file import InputFile
from pipeline.sources import order_files, read_chunk, scan_input
from tests.pipeline.conftest import read_input as read
from tests.pipeline.conftest import write_jsonl

COLUMNS = Columns(InputSection(path="in"), SamplingParams(), 1)


def read_rows(chunk, columns=COLUMNS):
    return [row for table in read_chunk(chunk, columns) for row in table.to_pylist()]


def write_mixed(folder):
    """Records of several formats with one, two, three and five rows, bad ones and blank lines, 150 of them."""
    params = ["", {"n": 3}, {"n": 1}, {"n": 5}, {"n": 0}]
    records = [{"prompt": f"p{i}", "params": params[i % 5]} if i % 7 else "{" for i in range(40)]
    write_jsonl(folder / "a.jsonl", ["", *records, ""])
    with gzip.open(folder / "b.jsonl.gz", "wb") as file:
        file.write((folder / "a.jsonl").read_bytes())
    table = pa.table({"prompt": [f"p{i}" for i in range(40)], "params": [json.dumps({"n": 1 + i // 20}) for i in range(40)]})
    pq.write_table(table, folder / "c.parquet", row_group_size=3)
    (folder / "d.csv").write_text("prompt,n\n" + "".join(f'"two\nlines {i}",{i}\n' for i in range(30)))


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
    (tmp_path / "d.csv").write_text("prompt,n\n" + "".join(f'"two\nlines {i}",{i}\n' for i in range(30)))
    (tmp_path / "e.txt").write_text("".join(f"line {i}\n\n" for i in range(30)))
    _, whole = read(tmp_path)
    monkeypatch.setattr(sources, "_CHUNK_RECORDS", 7)
    plan, rows = read(tmp_path)
    assert len(plan.chunks) == 12 + 12 + 1 + 5 + 5  # a gzip stream is one chunk
    assert rows == whole
    assert [row["id"] for row in rows[:2]] == ["a.jsonl:2", "a.jsonl:3"]
    assert [row["id"] for row in rows[240:242]] == ["d.csv:2", "d.csv:4"]
    assert [f.name for f in plan.files] == ["a.jsonl", "b.jsonl", "c.jsonl.gz", "d.csv", "e.txt"]
    assert plan.describe() == "300 records in 5 files (3 jsonl, 1 csv, 1 text)"
    monkeypatch.setattr(sources, "_CHUNK_BYTES", 1)
    plan, rows = read(tmp_path)
    assert len(plan.chunks) == 80 + 80 + 1 + 30 + 30
    assert rows == whole


@pytest.mark.parametrize("limit", [1, 6, 7, 8, 14, 30])
def test_limit_takes_the_first_records(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(sources, "_CHUNK_RECORDS", 7)
    for name in ("a.jsonl", "b.jsonl"):
        write_jsonl(tmp_path / name, [{"prompt": f"{name}{i}"} for i in range(15)])
    _, every = read(tmp_path)
    _, rows = read(tmp_path, limit=limit)
    assert rows == every[:limit]


def test_a_plan_has_few_chunks_however_long_the_input_is(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_CHUNK_RECORDS", 1)
    write_mixed(tmp_path)
    long, whole = read(tmp_path)
    assert len(long.chunks) == 40 + 1 + 14 + 30
    monkeypatch.setattr(sources, "_MAX_CHUNKS", 9)
    plan, rows = read(tmp_path)
    assert rows == whole
    assert 4 < len(plan.chunks) <= 9
    for number in range(30):  # more files than chunks: one each, and no more
        write_jsonl(tmp_path / f"e{number:02}.jsonl", [{"prompt": f"{i}"} for i in range(4)])
    plan, rows = read(tmp_path)
    assert len(rows) == len(whole) + 120
    assert len(plan.chunks) <= 2 * 34
    write_jsonl(tmp_path / "even.jsonl", [{"prompt": f"{i}"} for i in range(200)])
    sizes = [chunk.num_records for chunk in read(tmp_path / "even.jsonl")[0].chunks]
    assert len(sizes) <= 9
    assert max(sizes) <= 2 * sorted(sizes)[1]  # even, but for the last one


def test_chunks_are_cut_where_their_rows_are_many(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_CHUNK_ROWS", 100)
    write_jsonl(tmp_path / "in.jsonl", [{"prompt": "x", "params": {"n": n}} for n in (99, 1, 1, 250, 20, 80)])
    plan, _ = read(tmp_path / "in.jsonl")
    assert [(chunk.row_index, chunk.num_records, chunk.first_row, chunk.num_rows) for chunk in plan.chunks] == [
        (0, 2, 0, 100), (2, 2, 100, 251), (4, 2, 351, 100),
    ]  # fmt: skip


@pytest.mark.parametrize(("chunk_records", "max_chunks"), [(1, 4096), (4, 4096), (1, 9), (1024, 4096)])
def test_only_the_rows_that_are_missing_are_read_again(tmp_path, monkeypatch, chunk_records, max_chunks):
    monkeypatch.setattr(sources, "_CHUNK_RECORDS", chunk_records)
    monkeypatch.setattr(sources, "_MAX_CHUNKS", max_chunks)
    write_mixed(tmp_path)
    plan, rows = read(tmp_path, num_samples=2)
    columns = Columns(InputSection(path="in"), SamplingParams(), 2)
    keys = np.array([(row["row_index"], row["sample"]) for row in rows])
    np.testing.assert_array_equal(plan.row_numbers(keys[:, 0], keys[:, 1].astype(np.int32)), np.arange(plan.num_rows))
    for share in (0.01, 0.3, 0.9, 0.99):
        is_done = np.random.default_rng(7).random(plan.num_rows) < share
        done = DoneSet(plan.num_rows)
        done.add(np.flatnonzero(is_done))
        chunks = plan.remaining(done)
        missing = [row for row, done in zip(rows, is_done, strict=True) if not done]
        assert [row for chunk in chunks for row in read_rows(chunk, columns)] == missing
        assert all(read_rows(chunk, columns) for chunk in chunks)
    sent = pickle.loads(pickle.dumps(chunks))
    assert [row for chunk in sent for row in read_rows(chunk, columns)] == missing
    assert plan.remaining(DoneSet(plan.num_rows)) == plan.chunks
    done.add(np.arange(plan.num_rows))
    assert plan.remaining(done) == []


def test_a_file_that_changed_after_the_scan_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "x"}, {"prompt": "y", "params": {"n": 6}}, {"prompt": "z"}])
    (file,), _ = find_files(str(path), "auto")
    plan = scan_input([dataclasses.replace(file, version="")], COLUMNS)  # as on a file system that does not tell
    done = DoneSet(plan.num_rows)
    done.add(np.arange(1, 8))
    changes = (
        [{"prompt": "x"}, {"prompt": "y", "params": {"n": 7}}, {"prompt": "z"}],
        [{"prompt": "x"}, {"prompt": "y", "params": {"n": 8}}, {"prompt": "z"}],
        [{"prompt": "x"}, {"prompt": "y"}, {"prompt": "z"}],
        [{"prompt": "x"}, {"prompt": "y", "params": {"n": 6}}],
    )
    for records in changes:
        write_jsonl(path, records)
        for chunk in (*plan.chunks, *plan.remaining(done)):
            with pytest.raises(UserError, match=r"in.jsonl' has changed since this run began"):
                read_rows(chunk)


@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz", "in.csv", "in.parquet"])
@pytest.mark.parametrize("keeps_size", [False, True])
def test_a_file_that_changed_but_for_its_number_of_rows_is_refused(tmp_path, name, keeps_size):
    path = tmp_path / name
    prompts = ["x", "y" if keeps_size else "yy"]
    if name.endswith(".parquet"):
        contents = [pq.write_table(pa.table({"prompt": [prompt]}), path) or path.read_bytes() for prompt in prompts]
    else:
        contents = [(f"prompt\n{p}\n" if name.endswith("csv") else json.dumps({"prompt": p})).encode() for p in prompts]
        contents = [gzip.compress(content, mtime=0) if name.endswith(".gz") else content for content in contents]
    path.write_bytes(contents[0])
    plan = scan_input(find_files(str(path), "auto")[0], COLUMNS)
    assert [row["prompt"] for row in read_rows(plan.chunks[0])] == ["x"]
    time.sleep(0.02)  # a clock tick of the file system
    path.write_bytes(contents[1])
    with pytest.raises(UserError, match=rf"{name}' has changed since this run began; allowed: input that stays as it is"):
        read_rows(plan.chunks[0])


def test_new_files_come_after_those_of_an_earlier_run(tmp_path):
    files = [InputFile(path=f"/data/{name}", name=name, format="jsonl") for name in "abcdef"]
    assert [file.name for file in order_files(files, [])] == list("abcdef")
    assert [file.name for file in order_files(files, ["e", "b", "gone"])] == list("ebacdf")
    for name in ("b.txt", "d.txt"):
        (tmp_path / name).write_text(f"{name} 1\n{name} 2\n")
    before = scan_input(find_files(str(tmp_path), "auto")[0], COLUMNS)
    for name in ("a.txt", "c.txt"):
        (tmp_path / name).write_text(f"{name} 1\n{name} 2\n")
    files = order_files(find_files(str(tmp_path), "auto")[0], [file.name for file in before.files])
    plan = scan_input(files, COLUMNS)
    assert plan.chunks[:2] == before.chunks
    names = [row["id"] for chunk in plan.chunks for row in read_rows(chunk)]
    assert names == [f"{name}.txt:{line}" for name in "bdac" for line in (1, 2)]
    limited = scan_input(files, Columns(InputSection(path="in", limit=5), SamplingParams(), 1))
    assert [row["id"] for chunk in limited.chunks for row in read_rows(chunk)] == names[:5]


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


def test_a_folder_in_sorted_order(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.jsonl", "sub/a.ndjson", "_note.jsonl", "README.md"):
        write_jsonl(tmp_path / name, [{"prompt": name}])
    _, rows = read(tmp_path)
    assert [row["id"] for row in rows] == ["b.jsonl:1", "sub/a.ndjson:1"]
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
        (b'{"prompt": "x", "id": "a"}\n' * 3, r"'a' \(in.jsonl:1 and in.jsonl:2\); 'a' \(in.jsonl:1 and in.jsonl:3\); set"),
        (b'{"promt": "x"}\n{"promt": "y"}\n', "did you mean 'promt'"),
    ],
)
def test_inputs_that_are_refused_up_front(tmp_path, content, message):
    (tmp_path / "in.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(tmp_path / "in.jsonl")


def test_the_first_repeated_ids_of_a_big_input_are_shown(tmp_path):
    ids = [*range(3000), *range(2990, -1, -1)]
    write_jsonl(tmp_path / "in.jsonl", [{"id": id, "prompt": "x"} for id in ids])
    with pytest.raises(
        UserError, match=r"repeated ids in column 'id': '2990' \(in.jsonl:2991 and in.jsonl:3001\); ('29\d\d' [^;]*; ){4}set"
    ):
        read(tmp_path / "in.jsonl")


def test_ids_of_equal_hash_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(repeated_ids, "hash", len, raising=False)
    write_jsonl(tmp_path / "in.jsonl", [{"id": id, "prompt": "x"} for id in "abcd"])
    assert len(read(tmp_path / "in.jsonl")[1]) == 4
    write_jsonl(tmp_path / "in.jsonl", [{"id": id, "prompt": "x"} for id in "abcda"])
    with pytest.raises(UserError, match=r"in column 'id': 'a' \(in.jsonl:1 and in.jsonl:5\); set"):
        read(tmp_path / "in.jsonl")


@pytest.mark.parametrize("run_ids", [1 << 20, 16])
def test_an_id_may_not_be_the_place_of_another_record(tmp_path, monkeypatch, run_ids):
    monkeypatch.setattr(repeated_ids, "_RUN_IDS", run_ids)
    lines = [f'{{"prompt": "{i}"}}' for i in range(50)]
    write_jsonl(tmp_path / "b.jsonl", lines)
    write_jsonl(tmp_path / "a.jsonl", [*lines, '{"prompt": "x", "id": "b.jsonl:51"}', '{"prompt": "x", "id": "b.jsonl:50"}'])
    with pytest.raises(UserError, match=r"'b.jsonl:50' \(a.jsonl:52 and b.jsonl:50\); set"):
        read(tmp_path)


def test_a_named_column_must_be_there(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", [{"prompt": "x", "uid": 1}])
    with pytest.raises(UserError, match=r"input.id: .*did you mean 'uid'"):
        read(tmp_path / "in.jsonl", id="uidd")
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "in.parquet")
    with pytest.raises(UserError, match=r"unknown column 'prompt' .allowed: text"):
        read(tmp_path / "in.parquet")
    (tmp_path / "in.csv").write_text("Prompt,n\nx,1\n")
    with pytest.raises(UserError, match=r"in.csv': unknown column 'prompt'; did you mean 'Prompt'"):
        read([tmp_path / "in.jsonl", tmp_path / "in.csv"])
    (tmp_path / "in.csv").write_text("prompt,n,n\nx,1,2\n")
    with pytest.raises(UserError, match="has the column 'n' 2 times"):
        read(tmp_path / "in.csv")
    (tmp_path / "in.txt").write_text("x\n")
    with pytest.raises(UserError, match=r"input.prompt: .*in.txt': unknown column 'text' .allowed: prompt"):
        read(tmp_path / "in.txt", prompt="text")


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"question": "x"}] * 2, r"c\.jsonl': unknown column 'prompt' .allowed: question. in every record; set input.prompt"),
        ([{"prompt": "x", "id": "b0"}], r"'b0' \(b.jsonl:1 and c.jsonl:1\); allowed: ids that the job does not have yet$"),
        ([{"prompt": "x"}, {"question": "x"}, "{"], None),
        (["{"], None),
    ],
)
def test_a_new_file_of_a_job_that_has_run_has_the_columns_by_itself(tmp_path, records, message):
    """Its error rows would be there for good. An id cannot be given up any more either."""
    write_jsonl(tmp_path / "b.jsonl", [{"prompt": "x", "id": "b0"}, {"question": "x"}])
    write_jsonl(tmp_path / "c.jsonl", records)
    write_jsonl(tmp_path / "d.jsonl", [{"prompt": "x"}])
    files = order_files(find_files(str(tmp_path), "auto")[0], ["b.jsonl"])
    if message is None:
        assert scan_input(files, COLUMNS).num_records == 3 + len(records)
    else:
        with pytest.raises(UserError, match=message):
            scan_input(files, COLUMNS)


def test_a_named_column_must_be_in_a_new_file(tmp_path):
    write_jsonl(tmp_path / "b.jsonl", [{"prompt": "x", "key": 1}])
    write_jsonl(tmp_path / "c.jsonl", [{"prompt": "x", "kee": 2}])
    columns = Columns(InputSection(path="in", id="key"), SamplingParams(), 1)
    files = order_files(find_files(str(tmp_path), "auto")[0], ["b.jsonl"])
    with pytest.raises(UserError, match=r"input.id: input file '.*c\.jsonl': no record has it: unknown column 'key'; did you mean 'kee'"):
        scan_input(files, columns)


def test_a_column_of_the_template_must_be_there(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", [{"document": "a", "note": 1}, {"note": 2}])
    _, rows = read(tmp_path / "in.jsonl", template="Summarise: {{ document }}")
    assert [row["prompt"] for row in rows] == ["Summarise: a", None]
    assert rows[1]["error_message"] == "in.jsonl:2: input.template: 'document' is undefined (missing or null)"
    assert json.loads(rows[0]["meta"]) == {"note": 1}
    with pytest.raises(UserError, match=r"input.template: no record has it: unknown column 'documnt'; did you mean 'document'"):
        read(tmp_path / "in.jsonl", template="{{ documnt }}")
    (tmp_path / "in.csv").write_text("document,note\na,1\n")
    with pytest.raises(UserError, match=r"input.template: .*in.csv': unknown column 'documnt'; did you mean 'document'"):
        read(tmp_path / "in.csv", template="{{ documnt }}")


@pytest.mark.parametrize(("name", "content"), [("a.jsonl.gz", b"plain"), ("b.csv.zst", b"a,b\n"), ("c.parquet", b"PAR1")])
def test_broken_files_are_refused_by_name(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=name):
        read(tmp_path / name)


def test_text_is_one_prompt_per_line(tmp_path):
    (tmp_path / "in.txt").write_bytes(b"one\r\n\n  \n  two \xe2\x80\xa8 \n\xff\nthree")
    _, rows = read(tmp_path / "in.txt")
    assert [(row["id"], row["prompt"]) for row in rows] == [
        ("in.txt:1", "one"), ("in.txt:4", "  two \u2028 "), ("in.txt:5", None), ("in.txt:6", "three"),
    ]  # fmt: skip
    assert rows[2]["error_message"] == "in.txt:5: invalid UTF-8: invalid start byte at byte 0 of the line"
    assert {row["meta"] for row in rows} == {None}


def test_csv_rows(tmp_path):
    (tmp_path / "in.csv").write_text('id,prompt,params,topic\n1,"a\nb",,sea\n2,,,\n3,c,"{""seed"": 4}",\n')
    _, rows = read(tmp_path / "in.csv")
    assert [(row["id"], row["prompt"], row["params"], row["error_type"]) for row in rows] == [
        ("1", "a\nb", None, None), ("2", None, None, "empty_prompt"), ("3", "c", '{"seed": 4}', None),
    ]  # fmt: skip
    assert rows[1]["error_message"] == "in.csv:4: prompt is empty or blank"
    assert json.loads(rows[0]["meta"]) == {"topic": "sea"}


@pytest.mark.parametrize("name", ["in.jsonl.gz", "in.txt.gz"])
def test_a_file_that_is_cut_short_ends_in_one_error_row(tmp_path, name):
    packed = gzip.compress(b"".join(b'{"prompt": "%d"}\n' % i for i in range(100)))
    (tmp_path / name).write_bytes(packed[:-30])
    (tmp_path / "later.jsonl").write_text('{"prompt": "x"}\n')
    _, rows = read(tmp_path)
    *whole, cut, later = rows
    assert 0 < len(whole) < 100
    assert {row["error_type"] for row in whole} == {None}
    assert (cut["id"], cut["error_type"]) == (f"{name}:{len(whole) + 1}", "bad_record")
    assert cut["error_message"].startswith(f"{name}:{len(whole) + 1}: the file is cut short: no whole line can be read after byte ")
    assert later["id"] == "later.jsonl:1"


def test_several_files_in_the_order_of_the_list(tmp_path):
    for name in ("b.txt", "a.txt", "c.txt"):
        (tmp_path / name).write_text(f"{name} 1\n{name} 2\n")
    _, rows = read([tmp_path / "c.txt", tmp_path / "*.txt"], limit=3)
    assert [row["id"] for row in rows] == ["c.txt:1", "c.txt:2", "a.txt:1"]


def test_tables_are_small_whatever_the_records_hold(tmp_path):
    records = [{"prompt": "x" * 1000, "params": {"n": 5000}}, {"prompt": "y" * 3_000_000, "params": {"n": 5}}]
    write_jsonl(tmp_path / "in.jsonl", records)
    plan = scan_input(find_files(str(tmp_path / "in.jsonl"), "auto")[0], COLUMNS)
    tables = [table for chunk in plan.chunks for table in read_chunk(chunk, COLUMNS)]
    assert sum(table.num_rows for table in tables) == plan.num_rows == 5005
    assert max(table.num_rows for table in tables) <= 128
    assert max(table.nbytes for table in tables) < 8 << 20


def test_a_scan_of_many_records_takes_little_memory(tmp_path):
    """The limit is on what the process takes beside its libraries, and on what it keeps."""
    (tmp_path / "in.jsonl").write_bytes(b"".join(b'{"id": "row-%d", "prompt": "%s"}\n' % (i, b"x" * 500) for i in range(40_000)))
    code = f"""
import pickle, resource
from engine.params import SamplingParams
from pipeline.columns import Columns
from pipeline.config import InputSection
from pipeline.files import find_files
from pipeline.sources import scan_input
columns = Columns(InputSection(path=''), SamplingParams(), 1)
files, _ = find_files({str(tmp_path / "in.jsonl")!r}, 'auto')
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
plan = scan_input(files, columns)
assert plan.num_records == 40_000
assert len(pickle.dumps(plan)) < 20_000
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 4 << 10  # KiB; the file has 21 MiB


def test_an_array_is_a_wrong_file_at_its_start_and_a_bad_line_elsewhere(tmp_path):
    path = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}, '[{"prompt": "b"}]', {"prompt": "c"}])
    assert [row["error_type"] for row in read(path)[1]] == [None, "bad_record", None]
