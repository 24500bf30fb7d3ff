"""CSV: one record may go over lines, and what is wrong with one is said with the line where it began."""

import gzip

import pytest

from engine.errors import RowError, UserError
from pipeline import csvfile
from pipeline.input_file import InputFile


def read(tmp_path, text: str | bytes, name="in.csv"):
    """(line, record) of each record; each must be found again from its own place."""
    path = tmp_path / name
    file = input_file(tmp_path, name)
    content = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(gzip.compress(content, mtime=0) if name.endswith(".gz") else content)
    found = list(csvfile.read_records(file))
    for index, (number, offset, _) in enumerate(found):
        if not name.endswith(".gz"):
            assert show(csvfile.read_records(file, offset=offset, first=number)) == show(found[index:])
    return show(found)


def input_file(tmp_path, name="in.csv") -> InputFile:
    return InputFile(str(tmp_path / name), name, "csv")


def show(found) -> list[tuple[int, dict | str]]:
    return [(number, record.message if isinstance(record, RowError) else record) for number, _, record in found]


def test_values_are_text_and_records_go_over_lines(tmp_path):
    text = '\ufeffid,prompt,note\r\n1,"a, ""b""\r\nc",\r\n\r\n2,\u2028 x ,"\x00"\r\n03,1.50,é'
    records = [(2, {"id": "1", "prompt": 'a, "b"\r\nc', "note": ""}), (5, {"id": "2", "prompt": "\u2028 x ", "note": "\x00"})]
    records.append((6, {"id": "03", "prompt": "1.50", "note": "é"}))
    assert read(tmp_path, text) == records
    assert read(tmp_path, text, "in.csv.gz") == records
    assert csvfile.read_columns(input_file(tmp_path)) == ["id", "prompt", "note"]


def test_a_quote_inside_a_field_is_a_character(tmp_path):
    assert read(tmp_path, 'id,prompt\n4,unclosed "quote\n') == [(2, {"id": "4", "prompt": 'unclosed "quote'})]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("1,2,3\n4,5\n", [(2, "has 3 fields; allowed: 2"), (3, None)]),
        ("1\n4,5\n", [(2, "has 1 fields; allowed: 2"), (3, None)]),
        ('1,"a"b\n4,5\n', [(2, "invalid CSV: ',' expected after"), (3, None)]),
        ('1,"a\n4,5\n6,7\n', [(2, "a quote is opened and never closed: all up to line 4, the end of the file, is lost")]),
        ('1,"a\n4,"5"\n6,7\n', [(2, "invalid CSV in lines 2 to 3: ',' expected after"), (4, None)]),
        (b'1,"a\n\xff",x\n4,5\n', [(2, "invalid UTF-8: invalid start byte at byte 0 of line 3"), (4, None)]),
        (b"1,\xe9\n4,5\n", [(2, "invalid UTF-8: invalid continuation byte at byte 2 of line 2"), (3, None)]),
        ("1,a\rb\n4,5\n", [(2, "invalid CSV: new-line character seen in unquoted field"), (3, None)]),
    ],
)
def test_what_is_wrong_with_a_record_ends_only_that_record(tmp_path, body, expected):
    content = b"id,prompt\n" + (body if isinstance(body, bytes) else body.encode())
    found = read(tmp_path, content)
    assert [number for number, _ in found] == [number for number, _ in expected]
    for (_, record), (_, message) in zip(found, expected, strict=True):
        assert record in ({"id": "4", "prompt": "5"}, {"id": "6", "prompt": "7"}) if message is None else record.startswith(message)


def test_big_fields(tmp_path, monkeypatch):
    text = "x" * 200_000  # beyond the parser's own limit
    assert read(tmp_path, f'id,prompt\n1,"{text}"\n') == [(2, {"id": "1", "prompt": text})]
    monkeypatch.setattr(csvfile, "_MAX_FIELD_CHARACTERS", 1000)
    open_quote = 'id,prompt\n1,"' + "x\n" * 1000 + "2,y\n"
    (number, message), *others, last = read(tmp_path, open_quote)
    assert number == 2
    assert message.startswith("invalid CSV in lines 2 to 5") and "field larger than field limit (1000)" in message
    assert last == (1002, {"id": "2", "prompt": "y"})  # lines are read on, one by one
    assert all(record == "has 1 fields; allowed: 2, as the first row" for _, record in others)


@pytest.mark.parametrize("body", ["1,a\n2,b\n3,", '1,a\n2,b\n3,"c\nd'])
def test_a_file_that_is_cut_short_gives_its_whole_records_and_says_so(tmp_path, body):
    packed = gzip.compress(b"id,prompt\n" + body.encode())
    (tmp_path / "in.csv.gz").write_bytes(packed[:-8])
    *records, (number, message) = show(csvfile.read_records(input_file(tmp_path, "in.csv.gz")))
    assert records == [(2, {"id": "1", "prompt": "a"}), (3, {"id": "2", "prompt": "b"})]
    assert number == 4
    assert message.startswith("the file is cut short")


@pytest.mark.parametrize("text", ["", "\n\r\n", "\ufeff"])
def test_a_file_without_rows_has_no_columns(tmp_path, text):
    assert read(tmp_path, text) == []
    assert csvfile.read_columns(input_file(tmp_path)) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (",prompt\n0,x\n", r"column 1 has no name .*index=False"),
        ("id,\n0,x\n", "column 2 has no name"),
        ("id;prompt\n0;x, y\n", "seems to be separated by ';'; allowed: CSV with commas"),
        ("id\tprompt\n0\tx\n", r"seems to be separated by '\\t'; allowed: CSV with commas"),
        ('"id,prompt\n', "no readable first row: unexpected end of data"),
        (b"id,pr\xff\n1,2\n", "no readable first row: invalid UTF-8"),
        ("id,prompt\r1,2\r", "no readable first row: new-line character"),
        ("id,prompt\n1,2\n".encode("utf-16"), "is UTF-16"),
    ],
)
def test_a_first_row_that_names_no_columns_is_refused(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        read(tmp_path, text)
