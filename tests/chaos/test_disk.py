"""The harness hits the writes that it aims at, and tells what a kill has left."""

import os
import threading
import time

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
def test_a_trigger_comes_in_its_write(output, monkeypatch, what, number):
    folder, fired, current, hits = LocalFolder(output.path), threading.Event(), [], []

    def hold(publish):
        """A write that is over at once may be over before a busy machine tells of it."""

        def wait_and_publish(staged, final):
            fired.wait(1)
            publish(staged, final)

        return wait_and_publish

    def fire():
        hits.extend(current)
        fired.set()

    monkeypatch.setattr(os, "link", hold(os.link))
    monkeypatch.setattr(os, "replace", hold(os.replace))
    output.begin_life()
    output.arm(Trigger(what, number), fire)
    for count in range(1, 5):
        current[:] = [("part", count)]
        folder.create(f"rows/part-{count:08}.parquet", encode_part(rows((f"r{count}", 0)), "run"))
        current[:] = [("run.json", count)]
        folder.replace("run.json", b"{}")
    assert hits == [(what, number)]
    until = time.monotonic() + 30
    while output.num_parts < 4 and time.monotonic() < until:
        time.sleep(0.01)
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
