"""A real S3 server on this machine for tests: moto's. A conftest makes the fixtures known by importing them."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

#: what would lead the default chain of credentials elsewhere
_OTHERS = ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_CA_BUNDLE")
_numbers = itertools.count()


@dataclass(frozen=True)
class Bucket:
    """url: of the server. options: the `storage_options` that lead to it. client: boto3's, to look and to set up without our own code."""

    url: str
    name: str
    client: Any = field(repr=False)

    @property
    def options(self) -> dict[str, Any]:
        return {"endpoint_url": self.url}

    def put(self, key: str, data: bytes = b"", **options: Any) -> str:
        """Writes an object; returns its `s3://` path."""
        self.client.put_object(Bucket=self.name, Key=key, Body=data, **options)
        return f"s3://{self.name}/{key}"

    def list_keys(self) -> list[str]:
        """All keys, as a plain listing shows them."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name)
        return [item["Key"] for page in pages for item in page.get("Contents", [])]


@contextmanager
def serve(middleware: Callable | None = None):
    """A server of its own. middleware: wraps its WSGI application."""
    from infra.s3_server import S3Server  # here, as most tests do without the second that moto takes

    server = S3Server(middleware=middleware)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def serve_nothing(resets: bool = False) -> Iterator[str]:
    """The URL of an endpoint that takes connections and never says a word. resets: and breaks them off."""
    connections: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                connection = listener.accept()[0]
            except OSError:  # closed
                return
            if resets:
                connection.close()
            else:
                connections.append(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    for connection in connections:
        connection.close()


@pytest.fixture(scope="session")
def s3_credentials():
    """In the environment of this process, and of whatever it starts: a Ray that is started after it has them too."""
    with pytest.MonkeyPatch.context() as patch:
        for name in _OTHERS:
            patch.delenv(name, raising=False)
        patch.setenv("AWS_ACCESS_KEY_ID", "test-key-id")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_CONFIG_FILE", "/nonexistent")
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
        yield


@pytest.fixture(scope="session")
def s3_server(s3_credentials):
    with serve() as server:
        yield server


@pytest.fixture
def s3_bucket(s3_server) -> Bucket:
    """A bucket that no other test has."""
    return make_bucket(s3_server)


def make_bucket(server) -> Bucket:
    bucket = Bucket(server.url, f"bucket-{next(_numbers)}", server.client())
    bucket.client.create_bucket(Bucket=bucket.name)
    return bucket
