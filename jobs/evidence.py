"""Result files under jobs/results: what was run, on what, and what came out."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def write_result(name: str, figures: dict[str, Any]) -> Path:
    """Write `figures` with what `describe_run` says to jobs/results/NAME.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({**describe_run(), **figures}, indent=1) + "\n")
    return path


def describe_run() -> dict[str, Any]:
    """The command of this process, its machine, and the versions of what runs in it."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["python", "-m", module.name] if module else [Path(sys.argv[0]).name]
    return {
        "command": shlex.join([*program, *sys.argv[1:]]),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {package: version(package) for package in ("torch", "transformers", "ray", "rheo")},
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
