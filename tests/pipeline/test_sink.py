"""Parts of the output: whole or not there, and a task that is run again adds nothing (FIELD-CASES A34, A45)."""

from __future__ import annotations

import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ray.data._internal.execution.interfaces import TaskContext

from engine.errors import EngineError, RowError
from engine.params import Result
from pipeline.schema import SCHEMA, make_record, make_table
from pipeline.sink import PartSink


def table(*ids: str) -> pa.Table:
    failed = (Result.failed(id, 0, RowError("empty_prompt", "empty"), prompt=None, seed=0) for id in ids)
    return make_table([make_record(result, row_index=0, meta=None, worker="w", depth=8) for result in failed])


@pytest.fixture
def write(tmp_path):
    """write(task, blocks) as a task of Ray Data would."""
    for name in ("staging", "rows"):
        (tmp_path / name).mkdir()
    folders = {name: str(tmp_path / name) for name in ("staging", "rows", "earlier")}
    sink = PartSink(**folders, run_id="run", rows_per_file=100)
    return lambda task, *blocks: sink.write(blocks, TaskContext(task_idx=task, op_name="write"))


def ids(folder) -> list[str]:
    return sorted(id for part in folder.glob("*.parquet") for id in pq.read_table(part)["id"].to_pylist())


def test_a_task_that_is_run_again_replaces_its_own_part(tmp_path, write):
    assert (write(3, table("a", "b"), table("c")), write(4, table("d"))) == (3, 1)
    assert write(3, table("a", "b", "c")) == 3  # it succeeded, and was killed before it could say so
    assert ids(tmp_path / "rows") == ["a", "b", "c", "d"]
    assert write(5, table(), pa.table({})) == 0
    assert len(list((tmp_path / "rows").iterdir())) == 2
    assert all(pq.read_schema(part).equals(SCHEMA) for part in (tmp_path / "rows").iterdir())


def test_a_writer_that_outlived_its_run_writes_nothing(tmp_path, write):
    (tmp_path / "staging").rmdir()
    with pytest.raises(EngineError, match=r"part-run-000003\.parquet' cannot be written"):
        write(3, table("a"))
    assert os.listdir(tmp_path / "rows") == []


@pytest.mark.parametrize("step", ["fsync", "rename"])
def test_a_write_that_fails_is_told_and_leaves_no_half_a_part(tmp_path, write, monkeypatch, step):
    """A full disk, before a part is whole and before it has its name."""
    write(3, table("a"))

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.raises(EngineError, match=r"cannot be written: .*No space left on device"):
            write(4, table("b"))
    assert ids(tmp_path / "rows") == ["a"]
    write(4, table("b"))
    assert ids(tmp_path / "rows") == ["a", "b"]
