"""OUT/run.json: what was run, with which versions, and what came of it. Holds no secrets: options that could are refused so far."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
from typing import Any

from engine.errors import UserError
from pipeline.config import JobConfig
from pipeline.files import InputFile
from pipeline.schema import SCHEMA_VERSION

NAME = "run.json"

_PACKAGES = ("rheo", "torch", "ray", "transformers", "pyarrow")

#: what every run.json has from its start
_NEEDED = {"status", "exit_code", "config", "input_files", "num_rows", "timing"}

#: options that change neither which rows there are nor what they hold
_FREE = {"ray", "output"}


def start(config: JobConfig, files: list[InputFile], *, run_id: str, num_records: int, num_rows: int) -> dict:
    """The content of run.json as a run begins."""
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": run_id,
        "status": "running",
        "exit_code": None,
        "config": dataclasses.asdict(config),
        "versions": versions(),
        "input_files": stamp_files(files),
        "num_records": num_records,
        "num_rows": num_rows,
        "counts": {},
        "timing": {},
    }


def read(output: str) -> dict | None:
    """The run in an output folder, or None. Raises UserError for a file that is no run.json."""
    path = os.path.join(output, NAME)
    try:
        with open(path, encoding="utf-8") as file:
            run = json.load(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, OSError) as error:
        raise UserError(f"'{path}' cannot be read: {error}") from None
    if not isinstance(run, dict) or not _NEEDED.issubset(run):
        raise UserError(f"'{path}' is not of a run of rheo; allowed: the output.path of a job")
    return run


def write(output: str, run: dict) -> None:
    """Whole or not at all."""
    path = os.path.join(output, NAME)
    with open(path + ".tmp", "w", encoding="utf-8") as file:
        json.dump(run, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".tmp", path)


def find_difference(run: dict, config: JobConfig, files: list[InputFile]) -> str | None:
    """The first option in which an earlier run differs from this job, with both values, or None."""
    now = dataclasses.asdict(config)
    for section, options in now.items():
        before = run["config"].get(section, {})
        if section in _FREE:
            continue
        for name, value in options.items():
            if before.get(name) != json.loads(json.dumps(value)):
                return f"{section}.{name} ({before.get(name)!r} -> {value!r})"
    if run["input_files"] != stamp_files(files):
        return "the input files (another list, size or time of change)"
    return None


def stamp_files(files: list[InputFile]) -> list[list]:
    return [[file.name, os.stat(file.path).st_size, os.stat(file.path).st_mtime_ns] for file in files]


def versions() -> dict[str, Any]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found
