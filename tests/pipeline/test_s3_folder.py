"""Against a real S3 server."""

import pytest

from engine.errors import UserError
from pipeline.s3_folder import S3Folder


@pytest.fixture
def folder(s3_bucket):
    return S3Folder(f"s3://{s3_bucket.name}/some/out/", s3_bucket.options)


def test_a_name_is_created_once(folder, s3_bucket):
    folder.create("rows/a", b"1")
    with pytest.raises(FileExistsError):
        folder.create("rows/a", b"2")
    assert folder.read("rows/a") == b"1"
    folder.replace("rows/a", b"3")
    assert folder.read("rows/a") == b"3"
    with folder.open("rows/a") as file:
        assert file.read() == b"3"
    s3_bucket.client.put_object(Bucket=s3_bucket.name, Key="some/out/rows/b", Body=b"of another process")
    assert folder.names("rows") == ["rows/a", "rows/b"]
    folder.delete("rows/a")
    folder.delete("rows/a")
    assert folder.names("rows") == ["rows/b"]
    assert folder.names("none") == []
    with pytest.raises(FileNotFoundError):
        folder.read("rows/a")


def test_the_probe_leaves_nothing(folder, s3_bucket):
    folder.probe()
    assert "Contents" not in s3_bucket.client.list_objects_v2(Bucket=s3_bucket.name)


def test_a_store_that_overwrites_is_refused(folder, monkeypatch):
    create = folder._fs.pipe_file
    monkeypatch.setattr(
        folder._fs, "pipe_file", lambda name, data, mode="overwrite": create(name, data)
    )  # as a store without If-None-Match
    with pytest.raises(UserError, match="ignores If-None-Match"):
        folder.probe()


def test_a_bucket_that_is_not_there_is_refused(s3_bucket):
    with pytest.raises(UserError, match=r"s3://not-there/out.*" + s3_bucket.url):
        S3Folder("s3://not-there/out", s3_bucket.options).probe()
