"""Small copies of what people's files look like: each gives good rows and typed error rows with their place, or is refused by name."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.errors import UserError
from pipeline.run import run_job
from tests.pipeline.conftest import read_input, read_rows

GOOD = [json.dumps({"id": f"ok{i}", "task": "t", "prompt": f"Write one sentence about the number {i}."}) for i in range(4)]


def lines(*records: str) -> bytes:
    return "".join(record + "\n" for record in records).encode()


def parquet(columns: dict) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


#: file -> its content, and the error of each row: None for a good one, else its type, then what the message says after the place
READ = {
    "good.jsonl": (lines(*GOOD), [None] * 4),
    "no_final_newline.jsonl": (lines(*GOOD)[:-1], [None] * 4),
    "crlf.jsonl": (lines(*GOOD).replace(b"\n", b"\r\n"), [None] * 4),
    "utf8_bom.jsonl": (b"\xef\xbb\xbf" + lines(*GOOD), [None] * 4),
    "broken_line.jsonl": (lines(GOOD[0], GOOD[1][:35], GOOD[2]), [None, "bad_record: invalid JSON: Expecting ':'", None]),
    "broken_many.jsonl": (
        lines(GOOD[0], GOOD[1] + ",", "", "  ", "// comment", "{'id':'py','prompt':'single quotes'}", GOOD[2]),
        [None, "bad_record: invalid JSON: Extra data", "bad_record: invalid JSON", "bad_record: invalid JSON", None],
    ),
    "two_objects_one_line.jsonl": (lines(GOOD[0] + GOOD[1], GOOD[2]), ["bad_record: invalid JSON: Extra data", None]),
    "invalid_utf8.jsonl": (lines(GOOD[0]) + b'{"prompt": "\xff"}\n', [None, "bad_record: invalid UTF-8: invalid start byte at byte 12"]),
    "latin1.jsonl": ('{"prompt": "bibliothèque"}\n'.encode("latin-1"), ["bad_record: invalid UTF-8"]),
    "separators.jsonl": (lines('{"prompt": "a\u2028b\u0085c"}'), [None]),
    "not_objects.jsonl": (
        lines('["not", "an", "object"]', '"text"', "3.14", "null", "{}", '{"prompt": "x"}'),
        [*["bad_record: the line holds a "] * 4, "bad_record: has no prompt and no messages; its keys: []", None],
    ),
    "odd.jsonl": (
        lines(r'{"prompt": "a", "prompt": "b"}', r'{"prompt": "a", "x": NaN}', r'{"prompt": "\ud83d"}', r'{"prompt": "\ude00\ud83d"}'),
        [None, None, "bad_record: prompt holds a lone surrogate", "bad_record: prompt holds a lone surrogate"],
    ),
    "wrong_shapes.jsonl": (
        lines(
            '{"id": "m2", "prompt": null}', '{"id": "m3", "prompt": 42}', '{"id": "m4", "prompt": ["a"]}', '{"id": "m5", "prompt": {}}',
            '{"id": "", "prompt": "x"}', '{"id": null, "prompt": "x"}', '{"id": 7, "prompt": "x"}', r'{"id": "../\u0000y", "prompt": "x"}',
            '{"prompt": ""}', r'{"prompt": " \t\u00a0"}', '{"prompt": "x", "messages": [{"role": "user", "content": "y"}]}',
        ),
        [
            "bad_record: prompt is null", "bad_record: prompt=42 is a number", "bad_record: prompt=['a'] is a list",
            "bad_record: prompt={} is an object", "bad_record: id=''; allowed", None, None, None,
            "empty_prompt: prompt is empty or blank", "empty_prompt: prompt is empty or blank", "bad_record: has both prompt and messages",
        ],
    ),
    "chats.jsonl": (
        lines(
            '{"messages": []}', '{"messages": [{"role": "wizard", "content": "hi"}]}', '{"messages": [{"role": "user"}]}',
            '{"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}', '{"messages": "hi"}',
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]}',
        ),
        [
            "empty_prompt: messages is an empty list", "bad_record: messages[0].role='wizard'; allowed: system",
            "bad_record: messages[0].content=None is null", "bad_record: messages[0].content=[{'type'",
            "bad_record: messages is text", None,
        ],
    ),
    "params.jsonl": (
        lines(
            '{"prompt": "x", "params": {"temperature": 0.5}}', r'{"prompt": "x", "params": "{\"top_p\": 0.5, \"stop\": [\"z\"]}"}',
            '{"prompt": "x", "params": {"max_tokens": -1}}', '{"prompt": "x", "params": {"temperature": "hot"}}',
            '{"prompt": "x", "params": {"stop": ["", null]}}', '{"prompt": "x", "params": {"max_token": 1}}',
        ),
        [
            None, None, "bad_params: max_tokens=-1; allowed", "bad_params: temperature='hot'; allowed", "bad_params: stop=",
            "bad_params: unknown sampling parameter 'max_token'; did you mean 'max_tokens'",
        ],
    ),
    "good.jsonl.gz": (gzip.compress(lines(*GOOD), mtime=0), [None] * 4),
    "truncated.jsonl.gz": (gzip.compress(lines(*GOOD), mtime=0)[:-8], [None] * 4 + ["bad_record: the file is cut short"]),
    "huge.jsonl.gz": (gzip.compress(lines('{"prompt": "%s"}' % ("x" * 1_200_000), GOOD[0])), [None, None]),
    "prompts.csv": (
        'id,task,prompt\n1,t,"comma, quote "" and\nnewline"\n2,t,\n3,t,"émoji 🎉"\n4,t,a "quote\n5,t,"never closed\n'.encode(),
        [None, "empty_prompt: prompt is empty or blank", None, None, "bad_record: a quote is opened and never closed"],
    ),
    "bytes.txt": (bytes(range(256)), [None, "bad_record: invalid UTF-8: invalid start byte at byte 117"]),
    "nulls.parquet": (
        parquet({"id": ["a", None, "c"], "prompt": [None, "x\x00y", " "]}),
        ["bad_record: prompt is null", None, "empty_prompt: prompt is empty or blank"],
    ),
    "wrong_types.parquet": (
        parquet({"id": [1, 2], "prompt": [1.5, None]}),
        ["bad_record: prompt=1.5 is a number", "bad_record: prompt is null"],
    ),
    "binary.parquet": (parquet({"prompt": [b"x", b"\xff"]}), [None, "bad_record: prompt is not UTF-8: invalid start byte at byte 0"]),
}  # fmt: skip

#: file -> its content, and why it is refused
REFUSED = {
    "empty.jsonl": (b"", "has no records"),
    "only_newlines.jsonl": (b"\n\n\n", "has no records"),
    "utf16le_bom.jsonl": (lines(*GOOD).decode().encode("utf-16"), "is UTF-16; allowed: UTF-8"),
    "pretty_printed.jsonl": (json.dumps([json.loads(record) for record in GOOD], indent=2).encode(), "is one JSON array"),
    "pretty_printed.json": (b"[]", "has no known suffix; allowed: .jsonl"),
    "repeated.jsonl.gz": (gzip.compress(lines(*GOOD) * 2, mtime=0), r"repeated ids in column 'id': 'ok0' \(repeated.jsonl.gz:1 and "),
    "not_really_gzip.jsonl.gz": (lines(*GOOD), "is no gzip file"),
    "no_prompt.jsonl": (b'{"promt": "x"}\n', "unknown column 'prompt'; did you mean 'promt'"),
    "no_prompt.csv": (b"id,promt\n1,x\n", "unknown column 'prompt'; did you mean 'promt'"),
    "no_prompt.parquet": (parquet({"text": ["x"]}), r"unknown column 'prompt' \(allowed: text\)"),
    "zero_rows.parquet": (parquet({"prompt": pa.array([], pa.string())}), "has no records"),
    "truncated.parquet": (parquet({"prompt": ["x"] * 99})[:-20], "is not readable Parquet"),
    "not_parquet.parquet": (b"PAR1 this is not parquet", "is not readable Parquet"),
}  # fmt: skip


def check_rows(rows: list[dict], expected: list[str | None], name: str) -> None:
    assert len(rows) == len(expected)
    for row, said in zip(rows, expected, strict=True):
        if said is None:
            assert row["error_type"] is None, row
            continue
        error, _, message = said.partition(": ")
        assert row["error_type"] == error
        file, _, place = row["error_message"].partition(":")
        number, _, text = place.partition(": ")
        assert (file, number.isdecimal()) == (name, True)
        assert text.startswith(message)


@pytest.mark.parametrize("name", READ)
def test_a_file_gives_good_rows_and_typed_error_rows(tmp_path, name):
    content, expected = READ[name]
    (tmp_path / name).write_bytes(content)
    check_rows(read_input(tmp_path / name)[1], expected, name)


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_is_refused_before_anything_starts(tmp_path, name):
    content, message = REFUSED[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_input(tmp_path / name)


def test_all_of_them_in_one_job(tmp_path, make_config, ray_session):
    source = tmp_path / "in"
    source.mkdir()
    for name, (content, _) in READ.items():
        (source / name).write_bytes(content)
    assert run_job(make_config(source, "input.id=null", "output.rows_per_file=20")) == 3
    rows = read_rows(tmp_path / "out")
    of_file = {name: [row for row in rows if row["id"].rpartition(":")[0] == name] for name in READ}
    assert sum(map(len, of_file.values())) == len(rows)
    for name, found in of_file.items():
        expected = [None if said is not None and "id=''" in said else said for said in READ[name][1]]
        check_rows(found, expected, name)
