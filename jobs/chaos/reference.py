"""What an undisturbed run of a job makes, on a disk, with a Ray of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from jobs.chaos.judge import Key, values_of
from jobs.chaos.processes import ROOT
from pipeline.exit_codes import ALL_ROWS_FAILED, OK, SOME_ROWS_FAILED

RHEO = (sys.executable, "-m", "pipeline.cli")


@dataclass(frozen=True)
class Reference:
    """folder: its output. boot_s: from its start to its first row."""

    folder: Path
    values: dict[Key, tuple]
    exit_code: int
    boot_s: float


def run_undisturbed(job: Path, folder: Path, overrides: Sequence[str]) -> Reference:
    """Raises RuntimeError when it fails."""
    command = [*RHEO, "run", str(job), *overrides, f"output.path={folder}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in (OK, SOME_ROWS_FAILED, ALL_ROWS_FAILED):
        raise RuntimeError(f"the undisturbed run failed with exit code {done.returncode}: {done.stderr}")
    run = json.loads((folder / "run.json").read_text())
    return Reference(folder, values_of(pq.read_table(folder / "rows")), done.returncode, run["timing"]["first_row_s"])
