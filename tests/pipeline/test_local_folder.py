import errno
import os

import pytest

from engine.errors import UserError
from pipeline.local_folder import LocalFolder


@pytest.fixture
def folder(tmp_path):
    folder = LocalFolder(str(tmp_path / "out"))
    with folder.lock():
        yield folder


def test_a_name_is_created_once(folder):
    folder.create("rows/a", b"1")
    with pytest.raises(FileExistsError):
        folder.create("rows/a", b"2")
    assert folder.read("rows/a") == b"1"
    folder.replace("rows/a", b"3")
    assert folder.read("rows/a") == b"3"
    assert folder.names("rows") == ["rows/a"]
    folder.delete("rows/a")
    folder.delete("rows/a")
    assert folder.names("rows") == folder.names("none") == []
    assert sorted(os.listdir(folder.path)) == [".lock", "rows"]


def test_a_file_system_without_hard_links_will_do(folder, monkeypatch):
    def refuse(*paths):
        raise OSError(errno.EOPNOTSUPP, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    folder.create("rows/a", b"1")
    with pytest.raises(FileExistsError):
        folder.create("rows/a", b"2")
    assert folder.read("rows/a") == b"1"


@pytest.mark.parametrize("call", ["link", "fsync"])
def test_a_file_that_cannot_be_finished_is_not_there(folder, monkeypatch, call):
    def refuse(*args):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(OSError, match="full"):
        folder.create("rows/a", b"1")
    assert folder.names("rows") == []


def test_one_run_at_a_time(folder):
    with pytest.raises(UserError, match="in use by another run"), LocalFolder(folder.path).lock():
        pass


def test_what_a_killed_run_left_half_written_goes(tmp_path):
    staging = tmp_path / ".staging"
    staging.mkdir()
    (staging / "part-00000000.parquet").write_bytes(b"half")
    with LocalFolder(str(tmp_path)).lock():
        assert not staging.exists()


def test_the_probe_leaves_nothing(tmp_path):
    LocalFolder(str(tmp_path / "a" / "b")).probe()
    assert os.listdir(tmp_path) == []


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path in ("file", "file/out"):
        with pytest.raises(UserError, match=r"output\.path"):
            LocalFolder(str(tmp_path / path)).probe()


@pytest.mark.parametrize("name", ["rows", ".staging"])
def test_a_folder_that_is_a_file_is_refused(tmp_path, name):
    (tmp_path / name).write_text("")
    with pytest.raises(UserError, match=rf"cannot be written: Not a directory: '.*{name}"):
        LocalFolder(str(tmp_path)).probe()


@pytest.mark.parametrize("name", [".lock", "run.json", "ray.log"])
def test_a_file_that_is_a_folder_is_refused(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=rf"cannot be written: Is a directory: '.*{name}"):
        LocalFolder(str(tmp_path)).probe()
