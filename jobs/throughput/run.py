"""`rheo bench`: round after round through all cells, then the table, the pictures and the files."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine.errors import UserError
from jobs.evidence import describe_run
from jobs.throughput.config import BenchConfig
from jobs.throughput.plots import plot_all
from jobs.throughput.session import Session, open_session
from jobs.throughput.table import Line, make_lines, render
from pipeline import exit_codes
from pipeline.local_folder import LocalFolder
from pipeline.notes import show, tell
from pipeline.s3 import is_s3


def run_bench(config: BenchConfig) -> int:
    """Measures what is not measured yet, and returns the exit code.

    Raises UserError before anything is loaded, also for an output that was begun with other options; EngineError where a system fails.
    """

    def work(folder: Path) -> None:
        repeats = range(config.measure.repeats)
        with open_session(config, folder) as session:
            try:
                for repeat in repeats:
                    session.measure(session.cells, repeat)
            finally:
                if lines := make_lines(session.store, session.cells, repeats, config.measure.baseline):
                    write_evidence(folder, session, lines, {"repeats": len(repeats)})
                    show(render(lines))

    return in_folder(config, work)


def in_folder(config: BenchConfig, work: Callable[[Path], None]) -> int:
    """The exit code of `work`, which nobody else disturbs in the output folder, and which Ctrl-C ends."""
    path = config.output.path
    if is_s3(path):
        raise UserError(f"output.path='{path}'; allowed: a local folder")
    folder = LocalFolder(path)
    folder.probe()
    with folder.lock():
        try:
            work(Path(path))
        except KeyboardInterrupt:
            tell("rheo: interrupted; the same command goes on from here")
            return exit_codes.SIGNAL_BASE + signal.SIGINT
    return exit_codes.OK


def write_evidence(folder: Path, session: Session, lines: Sequence[Line], more: dict[str, Any]) -> None:
    """measurements.parquet, bench.json and the pictures."""
    config, store = session.config, session.store
    store.write_table()
    peers = {m.cell.system: m.figures.versions for cell in session.cells for m in store.of_cell(cell) if m.figures.versions}
    evidence = {
        **describe_run(),
        **session.facts,
        "peers": peers,
        "target": session.found.target.name,
        "draft": None if session.found.draft is None else session.found.draft.name,
        "prompts": config.prompts.path,
        "seed": config.job.seed,
        "baseline": config.measure.baseline,
        **more,
        "cells": [line.to_json() for line in lines],
    }
    (folder / "bench.json").write_text(json.dumps(evidence, indent=1) + "\n", encoding="utf-8")
    plot_all(folder, store, lines)
