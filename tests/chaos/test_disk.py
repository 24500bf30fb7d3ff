"""The harness hits the writes that it aims at, and tells what a kill has left."""

import os
import threading

import pytest

from jobs.chaos.disk import DiskOutput
from jobs.chaos.moments import Trigger
from pipeline.local_folder import LocalFolder
from pipeline.parts import encode_part
from tests.chaos.test_judge import rows

NAME = "rows/part-00000000.parquet"


@pytest.fixture
def output(tmp_path):
    made = DiskOutput(tmp_path / "out")
    yield made
    made.close()


@pytest.mark.parametrize(("what", "number"), [("part", 1), ("part", 3), ("run.json", 2)])
def test_a_trigger_comes_in_its_write(output, what, number):
    folder, fired, seen = LocalFolder(output.path), threading.Event(), []
    output.begin_life()
    output.arm(Trigger(what, number), fired.set)
    for count in range(4):
        folder.create(f"rows/part-{count:08}.parquet", encode_part(rows((f"r{count}", 0)), "run"))
        seen.append(("part", count + 1, fired.wait(0.5)))
        folder.replace("run.json", b"{}")
        seen.append(("run.json", count + 1, fired.wait(0.5)))
    assert next(entry[:2] for entry in seen if entry[2]) == (what, number)
    assert output.num_parts == 4


def test_what_a_kill_left_is_told_apart(output, tmp_path):
    staging, data = tmp_path / "out" / ".staging", encode_part(rows(("a", 0)), "run")
    assert output.window() is None
    staging.mkdir()
    assert output.window() == "staging folder there, and empty"
    staged = staging / os.path.basename(NAME)
    staged.write_bytes(data[:10])
    assert output.window() == "part staged, 10 bytes of it, not linked"
    staged.write_bytes(data)
    assert output.window() == "part staged, whole, not linked"
    os.link(staged, tmp_path / "out" / NAME)
    assert output.window() == "part linked, still staged"
    staged.unlink()
    staged.write_bytes(b"")
    assert output.window() == "part to be replaced staged, 0 bytes of it, not linked"
    staged.unlink()
    (staging / "run.json").write_bytes(b"{")
    assert output.window() == "run.json staged, 1 bytes of it"
