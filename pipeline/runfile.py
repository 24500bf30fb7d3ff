"""OUT/run.json: what was run, with which versions, and what came of it. Holds no secrets: options that could are refused."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
from typing import Any

from engine.errors import UserError
from pipeline.config import JobConfig
from pipeline.folders import Folder
from pipeline.schema import SCHEMA_VERSION

NAME = "run.json"

_PACKAGES = ("rheo", "torch", "ray", "transformers", "pyarrow")

#: what every run.json has from its start
_NEEDED = {"status", "exit_code", "config", "fingerprint", "run_id", "runs", "dropped_runs", "first_part", "num_rows", "counts", "timing"}


def start(
    before: dict | None, config: JobConfig, *, run_id: str, first_part: int, fingerprint: dict, dropped_runs: list[str], **counts: int
) -> dict:
    """The content of run.json as a run begins, or goes on with what `before` says.

    runs: ids of the runs whose rows count. dropped_runs: of those whose rows were overwritten. first_part: the first number of a part
    that counts.
    """
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
    """The run in an output folder, or None. Raises UserError for a file that is no run.json."""
    path = f"{folder.path}/{NAME}"
    try:
        run = json.loads(folder.read(NAME))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, OSError) as error:
        raise UserError(f"'{path}' cannot be read: {error}") from None
    if not isinstance(run, dict) or not _NEEDED.issubset(run):
        raise UserError(f"'{path}' is not of a run of this rheo; allowed: the output.path of a job, or a new one")
    return run


def known_runs(folder: Folder) -> list[str]:
    """The ids of all runs that wrote into an output so far, of jobs that were overwritten too; none where that cannot be read."""
    try:
        run = read(folder) or {"dropped_runs": [], "runs": []}
    except UserError:
        return []
    return [*run["dropped_runs"], *run["runs"]]


def write(folder: Folder, run: dict) -> None:
    """Whole or not at all."""
    folder.replace(NAME, (json.dumps(run, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace"))


def versions() -> dict[str, Any]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found
