"""OUT/run.json: what was run, with which versions, and what came of it. Holds no secrets: options that could are refused."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import platform
import uuid
from typing import Any

from engine.errors import UserError
from pipeline.config import JobConfig
from pipeline.folders import Folder
from pipeline.schema import SCHEMA_VERSION

NAME = "run.json"

_ID_DIGITS = 8
_PACKAGES = ("rheo", "torch", "ray", "transformers", "pyarrow")

#: what every run.json has from its start
_NEEDED = {"status", "exit_code", "config", "fingerprint", "run_id", "runs", "dropped_runs", "first_part", "num_rows", "counts", "timing"}


def start(before: dict | None, config: JobConfig, *, first_part: int, fingerprint: dict, dropped_runs: list[str], **counts: int) -> dict:
    """The content of run.json as a run begins, or goes on with what `before` says.

    runs: ids of the runs whose rows count. dropped_runs: of those whose rows were overwritten. first_part: the first number of a part
    that counts.
    """
    if before:
        job_id = job_of(before["run_id"])
    elif first_part or dropped_runs:
        job_id = _make_id()
    else:  # of two runs that begin a job at once, each makes rows of the other's job
        job_id = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:_ID_DIGITS]
    run_id = f"{job_id}-{_make_id()}"
    before = before or {"runs": [], "dropped_runs": dropped_runs, "first_part": first_part, "counts": {}}
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": run_id,
        "status": "running",
        "exit_code": None,
        "config": dataclasses.asdict(config),
        "fingerprint": fingerprint,
        "versions": versions(),
        **counts,
        "runs": [*before["runs"], run_id],
        "dropped_runs": before["dropped_runs"],
        "first_part": before["first_part"],
        "counts": before["counts"],
        "timing": {},
        **{name: before[name] for name in ("engine",) if name in before},
    }


def read(folder: Folder) -> dict | None:
    """The run in an output folder, or None. Raises UserError for a file that is no run.json, and what the folder raises."""
    path = f"{folder.path}/{NAME}"
    try:
        run = json.loads(folder.read(NAME))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise UserError(f"'{path}' cannot be read: {error}") from None
    if not isinstance(run, dict) or not _NEEDED.issubset(run):
        raise UserError(f"'{path}' is not of a run of this rheo; allowed: the output.path of a job, or a new one")
    return run


def require(folder: Folder) -> dict:
    """As `read`. Raises UserError when there is none."""
    run = read(folder)
    if run is None:
        raise UserError(f"'{folder.path}' holds no run: there is no {NAME} in it; allowed: the output.path of a job")
    return run


def read_run_id(folder: Folder) -> str | None:
    """Of the run whose run.json is there; None where there is none, or none that says it."""
    try:
        return json.loads(folder.read(NAME))["run_id"]
    except (FileNotFoundError, NotADirectoryError, ValueError, LookupError, TypeError):
        return None


def job_of(run_id: str) -> str:
    """The id of the job that a run is of, with which its own id begins: so a part that names its run names its job."""
    return run_id.partition("-")[0]


def write(folder: Folder, run: dict) -> None:
    """Whole or not at all."""
    folder.replace(NAME, (json.dumps(run, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace"))


def _make_id() -> str:
    return uuid.uuid4().hex[:_ID_DIGITS]


def versions() -> dict[str, Any]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found
