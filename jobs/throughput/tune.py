"""`rheo bench --tune`: the best method, tree, depth and m for one workload, found by successive halving, into a job file.

One round measures all cells, and those below 70% of the best are dropped. The others get two rounds more, and the best of these is compared
with plain decoding in three rounds that had no part in the choice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from engine.errors import UserError
from jobs.throughput.cell import Cell
from jobs.throughput.config import BenchConfig
from jobs.throughput.job_file import check_job_file, write_job_file
from jobs.throughput.ratios import ratios, spread
from jobs.throughput.run import in_folder, write_evidence
from jobs.throughput.session import open_session
from jobs.throughput.store import Store
from jobs.throughput.table import make_lines, render
from pipeline.notes import show

_KEPT = 0.7  # of the best rate
_SCREENING = 0
_CHOICE = (1, 2)
_FRESH = (3, 4, 5)

_BASELINE = {"system": "engine", "method": "off"}


def tune(config: BenchConfig, job: Path) -> int:
    """Measures what is not measured yet, writes the best cell into `job`, and returns the exit code.

    job: a job file, whose `speculation` is replaced, or a new one.
    Raises UserError before anything is loaded, EngineError where a measurement fails.
    """
    config = dataclasses.replace(config, measure=dataclasses.replace(config.measure, baseline=_BASELINE))
    check_job_file(job)

    def work(folder: Path) -> None:
        with open_session(config, folder, choose=_require_one_workload) as session:
            store, cells = session.store, session.cells
            plain = next(cell for cell in cells if cell.method == "off")
            session.measure(cells, _SCREENING)
            kept = keep_best(store, cells)
            for repeat in _CHOICE:
                session.measure(kept, repeat)
            best = choose_best(store, kept)
            for repeat in _FRESH:
                session.measure(list(dict.fromkeys([plain, best])), repeat)
            gain = spread(ratios(store, best, plain, _FRESH))
            chosen = best if gain.median > 1 else plain
            lines = make_lines(store, cells, (_SCREENING, *_CHOICE, *_FRESH), _BASELINE)
            found = {"best": dataclasses.asdict(best), "over_off": dataclasses.asdict(gain), "written": chosen.variant}
            write_evidence(folder, session, lines, {"tuned": found})
            write_job_file(job, config, chosen)
            show(render(lines))
            over = f"{gain.median:.2f} times plain decoding in {len(_FRESH)} fresh rounds [{gain.low:.2f}, {gain.high:.2f}]"
            show(f"{job}: {chosen.variant} for batch {chosen.batch}; the best that was found, {best.variant}, is {over}")

    return in_folder(config, work)


def keep_best(store: Store, cells: Sequence[Cell]) -> list[Cell]:
    """Those that the first round has not ruled out."""
    rates = {cell: store.get(cell, _SCREENING).rate for cell in cells}
    return [cell for cell in cells if rates[cell] >= _KEPT * max(rates.values())]


def choose_best(store: Store, cells: Sequence[Cell]) -> Cell:
    """The fastest of the rounds after the screening, whose winners were lucky in part."""
    return max(cells, key=lambda cell: sum(store.get(cell, repeat).rate for repeat in _CHOICE))


def _require_one_workload(cells: list[Cell]) -> list[Cell]:
    for name in ("batch", "temperature", "prompt_tokens", "output_tokens"):
        values = list(dict.fromkeys(getattr(cell, name) for cell in cells))
        if len(values) > 1:
            raise UserError(f"grid.{name}={values} with --tune; allowed: one value, as it tunes for one workload")
    systems = list(dict.fromkeys(cell.system for cell in cells))
    if systems != ["engine"]:
        raise UserError(f"grid.system and peers name {', '.join(systems)} with --tune; allowed: engine")
    methods = list(dict.fromkeys(cell.method for cell in cells))
    if "off" not in methods or len(methods) < 2:
        raise UserError(f"grid.method={methods} with --tune; allowed: off, which is compared with, and at least one that drafts")
    return cells
