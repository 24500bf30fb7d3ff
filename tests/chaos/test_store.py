"""The gate before the store: requests that are cut off, and such as come late."""

import contextlib
import threading

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from infra.s3_server import S3Server
from jobs.chaos.moments import PHASES, Trigger
from jobs.chaos.store import Gate, StoreOutput
from pipeline.parts import encode_part
from pipeline.s3_folder import S3Folder
from tests.chaos.test_judge import rows
from tests.s3 import s3_credentials  # noqa: F401, a fixture

NAME = "rows/part-00000000.parquet"


@pytest.fixture
def store(s3_credentials, request):  # noqa: F811
    gates = []

    def make_gate(app):
        gates.append(Gate(app))
        return gates[0]

    server = S3Server(middleware=make_gate)
    output = StoreOutput(server, gates[0], request.node.name.translate(str.maketrans("[]", "--")))
    output.begin_life()
    yield output, S3Folder(output.path, {"endpoint_url": server.url}), server.url
    output.close()
    server.close()


def put_once(url: str, output: StoreOutput) -> threading.Thread:
    """What a driver sends that is killed in it: there is no second attempt."""
    once = Config(retries={"total_max_attempts": 1}, read_timeout=10)
    client = boto3.client("s3", endpoint_url=url, config=once)
    bucket, _, prefix = output.path.removeprefix("s3://").partition("/")
    key = f"{prefix}/{NAME}".lstrip("/")

    def send() -> None:
        with contextlib.suppress(BotoCoreError, ClientError):
            client.put_object(Bucket=bucket, Key=key, Body=encode_part(rows(("first", 0)), "first"), IfNoneMatch="*")

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.parametrize("phase", PHASES)
def test_a_request_is_cut_where_it_was_to_be(store, phase):
    output, _, url = store
    there_then = []
    output.arm(Trigger("part", 1, phase=phase, delay_s=0.5), lambda: there_then.append(dict(output.list_parts())))
    put_once(url, output).join()
    assert [bool(parts) for parts in there_then] == [phase == "stored"]
    assert output.window() == f"PUT of a part: {phase}"
    output.settle()
    assert bool(output.list_parts()) == (phase in ("stored", "late"))


def test_a_late_request_comes_just_before_the_next_of_its_name(store):
    output, folder, url = store
    output.arm(Trigger("part", 1, phase="late", release="before"), lambda: None)
    put_once(url, output).join()
    assert dict(output.list_parts()) == {}
    with pytest.raises(FileExistsError):
        folder.create(NAME, encode_part(rows(("second", 0)), "second"))
    assert b"first" in output.read(NAME)
    assert "just before a PUT of its name: 200 OK" in output.settle()[0]


@pytest.mark.parametrize(("release", "why"), [("after", "just after a PUT of its name"), ("clock", "by the clock")])
def test_a_late_request_that_finds_its_name_taken_is_refused(store, release, why):
    output, folder, url = store
    output.arm(Trigger("part", 1, phase="late", release=release, delay_s=0.5), lambda: None)
    put_once(url, output).join()
    folder.create(NAME, encode_part(rows(("second", 0)), "second"))
    assert f"{why}: 412" in output.settle()[0]
    assert b"second" in output.read(NAME)


def test_a_late_request_that_meets_no_other_comes_at_the_end(store):
    output, _, url = store
    output.arm(Trigger("part", 1, phase="late", release="after"), lambda: None)
    put_once(url, output).join()
    assert "with nobody else at work: 200 OK" in output.settle()[0]
    assert list(output.list_parts()) == [NAME]
