"""Against a real S3 server."""

import gc
import os
import time

import aiohttp
import pytest
from botocore.exceptions import NoCredentialsError, ReadTimeoutError

from engine.errors import EngineError, UserError
from pipeline import s3_folder
from pipeline.folders import explained_failures
from pipeline.s3_files import find_objects
from pipeline.s3_folder import S3Folder
from tests.s3 import serve, serve_nothing


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
    monkeypatch.setattr(folder._fs, "pipe_file", lambda name, data, mode, timeout: create(name, data))  # as a store without If-None-Match
    with pytest.raises(UserError, match="ignores If-None-Match"):
        folder.probe()


def test_a_bucket_that_is_not_there_is_refused(s3_bucket):
    with pytest.raises(UserError, match=r"s3://not-there/out.*" + s3_bucket.url):
        S3Folder("s3://not-there/out", s3_bucket.options).probe()


def test_an_endpoint_that_does_not_answer_is_given_up(s3_credentials, monkeypatch):
    for module in ("s3_folder", "s3_files"):
        monkeypatch.setattr(f"pipeline.{module}.ANSWER_S", 1.0)
    started = time.monotonic()
    with serve_nothing() as url:
        options = {"endpoint_url": url}
        with pytest.raises(UserError, match=f"'s3://some/out/.probe-.*' at {url}: the endpoint does not answer, for key 'out/.probe-"):
            S3Folder("s3://some/out", options).probe()
        for entry in ("s3://some/in", "s3://some/in/"):
            with pytest.raises(UserError, match=f"'{entry}' at {url}: the endpoint does not answer, for key 'in"):
                find_objects(entry, options)
    assert time.monotonic() - started < 20


def test_no_put_waits_for_leave_to_go_on(s3_bucket):
    """Where that never comes, aiohttp would wait without an end."""
    seen = []

    def note(app):
        def call(environ, start_response):
            seen.append((environ["REQUEST_METHOD"], environ.get("HTTP_EXPECT")))
            return app(environ, start_response)

        return call

    with serve(note) as server:
        folder = S3Folder(f"s3://{s3_bucket.name}/out", {"endpoint_url": server.url})
        folder.create("a", b"1")
        folder.replace("a", b"2")
    assert seen == [("PUT", None)] * 2


def test_a_store_that_stops_taking_bytes_is_given_up(s3_credentials, monkeypatch):
    monkeypatch.setattr(s3_folder, "_PUT_S", 1.0)
    monkeypatch.setattr(s3_folder, "_LEAST_BYTES_PER_S", 1 << 26)
    with serve_nothing() as url, pytest.raises(TimeoutError, match="the store has not taken it within 2 s"):
        S3Folder("s3://some/out", {"endpoint_url": url}).replace("a", bytes(1 << 26))  # more than the buffers on the way hold


def test_lost_connections_are_told_once(s3_credentials, caplog):
    with serve_nothing(resets=True) as url:
        folder = S3Folder("s3://some/out", {"endpoint_url": url, "config_kwargs": {"retries": {"total_max_attempts": 3}}})
        with pytest.raises(UserError, match="the endpoint cannot be reached"):
            folder.probe()
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (NoCredentialsError(), r"no credentials .*; allowed: those of the environment"),
        (ReadTimeoutError(endpoint_url="http://x"), "the endpoint does not answer"),
        (aiohttp.ClientPayloadError("cut short"), "ClientPayloadError: cut short"),
        (PermissionError("Access Denied"), "PermissionError: Access Denied"),
    ],
)
@pytest.mark.parametrize("kind", [EngineError, UserError])
def test_failures_of_the_store_are_explained(folder, error, message, kind):
    with pytest.raises(kind, match=rf"output\.path '{folder.path}' at http://127.*: {message}"), explained_failures(folder, kind):
        raise error


def test_the_log_stays_where_an_error_may_name_it(folder):
    with folder.log_folder() as logs:
        assert os.path.isdir(logs)
    assert not os.path.exists(logs)
    with pytest.raises(EngineError), folder.log_folder() as logs:
        raise EngineError(f"what it left is in {logs}")
    assert os.path.isdir(logs)
    os.rmdir(logs)
