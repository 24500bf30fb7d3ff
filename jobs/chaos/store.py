"""An output in an object store, and the gate before it: requests that a killed driver has sent are lost, cut off, answered, or late."""

from __future__ import annotations

import contextlib
import io
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from jobs.chaos.moments import Trigger

_BUCKET = "chaos"
_MEETING_S = 0.05  # for a late request to get in first
_PART = re.compile(rf"/{_BUCKET}/[^?]+/rows/part-\d+\.parquet")
_RUN = re.compile(rf"/{_BUCKET}/[^?]+/run\.json")


class _Late:
    """A request that waits to be let in: before or after the next one of its name. why: it was."""

    def __init__(self, release: str):
        self.release = release
        self.go_on = threading.Event()
        self.why = ""

    def let_in(self, why: str) -> None:
        if not self.go_on.is_set():
            self.why = why
            self.go_on.set()


class Gate:
    """WSGI middleware before the store. Takes PUTs apart when it is told to, kills in the middle of one, and lets it in later.

    A late request is let in after a time, or just before or after another driver's PUT of the same name, or else after the job's end.
    """

    def __init__(self, app: Callable):
        self._app = app
        self._armed: tuple[Trigger, Callable[[], None]] | None = None
        self._num_writes = {"part": 0, "run.json": 0}
        self._in_flight: list[str] = []
        self._late: dict[str, _Late] = {}  # path -> the request that waits for another of its name
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self.num_parts = 0
        self.fired: str | None = None
        self.outcomes: list[str] = []  # of late requests

    def begin_life(self) -> None:
        with self._lock:
            self._armed = self.fired = None
            self.num_parts = 0
            self._num_writes = {"part": 0, "run.json": 0}

    def arm(self, trigger: Trigger, fire: Callable[[], None]) -> None:
        self._armed = (trigger, fire)

    def disarm(self) -> None:
        self._armed = None

    def in_flight(self) -> str | None:
        return next(iter(self._in_flight), None)

    def settle(self) -> None:
        """Lets everything in that is still to come, and waits for it."""
        for late in list(self._late.values()):
            late.let_in("with nobody else at work")
        self._late.clear()
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def __call__(self, environ: dict, start_response: Callable):
        what = _kind(environ)
        if what is None:
            return self._app(environ, start_response)
        path = environ["PATH_INFO"]
        with self._lock:
            meets = self._late.pop(path, None)
            self._num_writes[what] += 1
            due, number = self._armed, self._num_writes[what]
            is_due = due is not None and (due[0].what, due[0].number) == (what, number)
            if is_due:
                self._armed = None
        if meets is not None and meets.release == "before":
            meets.let_in("just before a PUT of its name")
            time.sleep(_MEETING_S)
        answer = self._cut(environ, start_response, what, *due) if is_due else self._pass(environ, start_response, what)
        if meets is not None:
            meets.let_in("just after a PUT of its name")
        return answer

    def _pass(self, environ: dict, start_response: Callable, what: str):
        self._in_flight.append(what)
        try:
            answer = self._app(environ, start_response)
        finally:
            self._in_flight.remove(what)
        self.num_parts += what == "part"
        return answer

    def _cut(self, environ: dict, start_response: Callable, what: str, trigger: Trigger, fire: Callable[[], None]):
        kind = what if what == "run.json" or "HTTP_IF_NONE_MATCH" in environ else "part to be replaced"
        length = int(environ.get("CONTENT_LENGTH") or 0)
        self.fired = f"PUT of a {kind}: {trigger.phase}"
        if trigger.phase == "half":
            environ["wsgi.input"].read(length // 2)
        if trigger.phase in ("dropped", "half"):
            fire()
        elif trigger.phase == "stored":
            answer = self._app(environ, start_response)
            fire()
            return answer
        else:
            environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(length))
            self._hold(environ, kind, trigger)
            fire()
        start_response("503 Service Unavailable", [("Content-Length", "0")])  # to nobody
        return []

    def _hold(self, environ: dict, kind: str, trigger: Trigger) -> None:
        late = _Late(trigger.release)
        if trigger.release != "clock":
            self._late[environ["PATH_INFO"]] = late
        killed_at = time.monotonic()

        def pass_late() -> None:
            if not late.go_on.wait(trigger.delay_s if trigger.release == "clock" else None):
                late.why = "by the clock"
            answers: list[str] = []
            for _ in self._app(environ, lambda status, *_: answers.append(status)):
                pass
            name = environ["PATH_INFO"].rpartition("/")[2]
            self.outcomes.append(f"PUT of a {kind} ({name}) {time.monotonic() - killed_at:.1f} s after the kill, {late.why}: {answers[0]}")

        thread = threading.Thread(target=pass_late, daemon=True)
        self._threads.append(thread)
        thread.start()


class StoreOutput:
    """A prefix in a bucket of the gate's store, empty at first. server: an infra.s3_server.S3Server."""

    def __init__(self, server, gate: Gate, name: str):
        self.path = f"s3://{_BUCKET}/{name}"
        self.overrides = [f"output.storage_options.endpoint_url={server.url}"]
        self._prefix = f"{name}/"
        self._client = server.client()
        self._gate = gate
        self._client.create_bucket(Bucket=_BUCKET)

    @property
    def num_parts(self) -> int:
        """Written since the last call of `begin_life`."""
        return self._gate.num_parts

    def begin_life(self) -> None:
        self._gate.begin_life()

    def arm(self, trigger: Trigger, fire: Callable[[], None]) -> None:
        """Calls `fire` in the middle of a write."""
        self._gate.arm(trigger, fire)

    def disarm(self) -> None:
        self._gate.disarm()

    def window(self) -> str | None:
        """The request that a dead driver was in the middle of."""
        what = self._gate.in_flight()
        return self._gate.fired or (what and f"PUT of a {what}: in flight")

    def list_parts(self) -> Mapping[str, str]:
        """What a plain listing shows: name -> ETag."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=_BUCKET, Prefix=f"{self._prefix}rows/")
        found = {item["Key"].removeprefix(self._prefix): item["ETag"] for page in pages for item in page.get("Contents", [])}
        return {name: tag for name, tag in found.items() if name.endswith(".parquet")}

    def read_changed(self, name: str, listed: str, known: object) -> tuple[object, bytes | None]:
        """(version, content) of a part, without the content where the version is the known one. Raises FileNotFoundError."""
        if listed == known:
            return known, None
        return self._get(name)

    def read(self, name: str) -> bytes:
        """Raises FileNotFoundError."""
        return self._get(name)[1]

    def read_run(self) -> dict | None:
        with contextlib.suppress(FileNotFoundError):
            return json.loads(self.read("run.json"))
        return None

    def fill(self, folder: Path) -> None:
        """Takes over what another job has written."""
        for path in (folder / "run.json", *(folder / "rows").iterdir()):
            key = f"{self._prefix}{path.relative_to(folder)}"
            self._client.put_object(Bucket=_BUCKET, Key=key, Body=path.read_bytes())

    def settle(self) -> list[str]:
        """Waits for what is still to come; returns what came of every late request."""
        self._gate.settle()
        outcomes, self._gate.outcomes = self._gate.outcomes, []
        return outcomes

    def close(self) -> None:
        """Drops what is there."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=_BUCKET, Prefix=self._prefix)
        for item in [item for page in pages for item in page.get("Contents", [])]:
            self._client.delete_object(Bucket=_BUCKET, Key=item["Key"])

    def _get(self, name: str) -> tuple[str, bytes]:
        try:
            found = self._client.get_object(Bucket=_BUCKET, Key=self._prefix + name)
        except self._client.exceptions.NoSuchKey:
            raise FileNotFoundError(name) from None
        return found["ETag"], found["Body"].read()


def _kind(environ: dict) -> str | None:
    if environ["REQUEST_METHOD"] != "PUT":
        return None
    path = environ["PATH_INFO"]
    return "part" if _PART.fullmatch(path) else "run.json" if _RUN.fullmatch(path) else None
