"""What the chaos runs look for must be found when it is there."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.chaos.disk import DiskOutput
from jobs.chaos.judge import BrokenPart, compare, find_doubled, read_table, values_of
from jobs.chaos.watcher import Watcher
from pipeline.schema import make_table


def rows(*keys, **changes):
    record = {"status": "ok", "text": "a b", "token_ids": [1, 2], "finish_reason": "stop", "row_index": 0}
    return make_table([{**record, "id": id, "sample": sample, **changes} for id, sample in keys])


def encode(table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue().to_pybytes()


REFERENCE = values_of(rows(("a", 0), ("a", 1), ("b", 0)))


def test_the_same_rows_in_another_order_are_good():
    verdict = compare(rows(("b", 0), ("a", 1), ("a", 0), worker="w2", latency_s=3.0), REFERENCE)
    assert verdict.is_good


@pytest.mark.parametrize(
    ("table", "what", "keys"),
    [
        (rows(("a", 0), ("b", 0)), "lost", [("a", 1)]),
        (rows(("a", 0), ("a", 1), ("b", 0), ("b", 0)), "doubled", [("b", 0)]),
        (rows(("a", 0), ("a", 1), ("b", 0), ("c", 0)), "foreign", [("c", 0)]),
        *((rows(*REFERENCE, **{name: value}), "unequal", list(REFERENCE)) for name, value in
          {"status": "error", "text": "a", "token_ids": [1], "finish_reason": "length"}.items()),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told(table, what, keys):
    verdict = compare(table, REFERENCE)
    assert not verdict.is_good
    assert {name: found for name, found in vars(verdict).items() if found} == {what: keys}


def test_half_a_file_and_another_schema_are_told():
    data = encode(rows(("a", 0)))
    assert read_table("part", data).num_rows == 1
    for broken in (b"", data[: len(data) // 2], data[:-1]):
        with pytest.raises(BrokenPart, match="cannot be read"):
            read_table("part", broken)
    with pytest.raises(BrokenPart, match="another schema"):
        read_table("part", encode(rows(("a", 0)).drop_columns(["meta"])))


def test_a_key_in_two_parts_is_told():
    assert find_doubled({"p0": [("a", 0), ("a", 1)], "p1": [("b", 0)]}) == []
    assert find_doubled({"p0": [("a", 0), ("a", 1)], "p1": [("a", 1)]}) == ["('a', 1) in p0, p1"]


def test_the_watcher_sees_what_is_there_for_a_moment_only(tmp_path):
    output = DiskOutput(tmp_path / "out")
    watcher = Watcher(output, interval_s=1000)
    folder = tmp_path / "out" / "rows"
    try:
        (folder / "part-00000000.parquet").write_bytes(encode(rows(("a", 0), ("a", 1))))
        watcher.look()
        assert (watcher.num_rows, watcher.num_parts, watcher.complaints) == (2, 1, [])
        (folder / "part-00000001.parquet").write_bytes(encode(rows(("a", 1))))
        watcher.look()
        (folder / "part-00000001.parquet").write_bytes(b"PAR1")
        watcher.look()
        (folder / "part-00000001.parquet").unlink()
        watcher.look()
        assert [text.split(":")[0] for text in watcher.complaints] == [
            "1 keys are there twice",
            "rows/part-00000001.parquet (4 bytes) cannot be read",
        ]
    finally:
        watcher.close()
        output.close()
