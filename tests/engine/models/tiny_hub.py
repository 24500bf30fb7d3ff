"""A Hugging Face hub on this machine, for the few requests that huggingface_hub makes to find and download a model."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[3]


class TinyHub:
    """Serves the folders `root/org/name`, each at one commit, which is also its branch main.

    requests: method and path of each request, in order. gated: repositories that nobody here may read.
    """

    def __init__(self, root: Path):
        self.root = root
        self.requests: list[str] = []
        self.gated: set[str] = set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def commit(self, repository: str) -> str:
        return hashlib.sha1(repository.encode()).hexdigest()

    def run(self, code: str, home: Path, **env: str) -> str:
        """What a fresh process prints whose hub this is and whose cache is `home`."""
        own = {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        done = subprocess.run([sys.executable, "-c", code], env=inherited | own | env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout


class _Handler(BaseHTTPRequestHandler):
    hub: TinyHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.hub.requests.append(f"{self.command} {path}")
        if path == "/api/agent-harnesses":  # asked by each cache once a day
            self._send(b'{"standardEnvVars": [], "harnesses": {}}')
            return
        is_api = path.startswith("/api/models/")
        org, name, action, revision, *rest = path.removeprefix("/api/models").strip("/").split("/")
        repository, file = f"{org}/{name}", "/".join(rest)
        folder, commit = self.hub.root / repository, self.hub.commit(f"{org}/{name}")
        if not folder.is_dir():
            self._refuse(401, "RepoNotFound")
        elif repository in self.hub.gated:
            self._refuse(403, "GatedRepo")
        elif revision not in ("main", commit):
            self._refuse(404, "RevisionNotFound")
        elif is_api and action == "revision":
            files = [{"rfilename": file} for file in self._files(folder)]
            self._send(json.dumps({"id": repository, "sha": commit, "siblings": files}).encode())
        elif is_api and action == "tree":
            entries = [{"type": "file", "path": file, "size": len(data), "oid": _etag(data)} for file, data in self._files(folder).items()]
            self._send(json.dumps(entries).encode())
        elif action == "resolve" and (folder / file).is_file():
            data = (folder / file).read_bytes()
            self._send(data, {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": commit})
        else:
            self._refuse(404, "EntryNotFound")

    def _files(self, folder: Path) -> dict[str, bytes]:
        return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}

    def _send(self, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(200)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_) -> None:
        """Nothing on stderr."""


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
