"""A real S3 server on this machine, without an account: moto's. For the tests, the chaos runs, and to try `s3://` by hand.

python -m infra.s3_server --port 9000 --bucket rheo
"""

from __future__ import annotations

import argparse
import logging
import threading
from collections.abc import Callable

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server


class S3Server:
    """Serves on 127.0.0.1 until closed, from threads of this process; all servers of a process share their buckets.

    Args:
        port: 0 takes a free one.
        middleware: wraps the WSGI application, so that a caller sees every request before the server does.
    """

    def __init__(self, port: int = 0, middleware: Callable | None = None):
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", port, middleware(app) if middleware else app, threaded=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def client(self, service: str = "s3"):
        """A boto3 client, for looking at what is there without the code under test."""
        return boto3.client(service, endpoint_url=self.url, region_name="us-east-1", aws_access_key_id="rheo", aws_secret_access_key="rheo")

    def close(self) -> None:
        self._server.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument("--bucket", default="rheo")
    options = parser.parse_args()
    server = S3Server(options.port)
    server.client().create_bucket(Bucket=options.bucket)
    print(f"s3://{options.bucket} at {server.url}; any credentials do; Ctrl-C ends it and drops what it holds")
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        server.close()


if __name__ == "__main__":
    main()
