"""The result as a table and as figures for a JSON file: medians over repeats."""

from __future__ import annotations

import dataclasses
import io
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from engine.stopwatch import PHASES
from jobs.throughput.cell import Cell, find_baseline
from jobs.throughput.measurement import Measurement
from jobs.throughput.ratios import Spread, ratios, spread
from jobs.throughput.store import Store

_MIN_WIDTH = 120
_PLAIN_WIDTH = 170  # of a file


@dataclass(frozen=True, kw_only=True)
class Line:
    """Of one cell. cycle_ms: of a pass in which no row reads its prompt, by phase; None where the system does not say. ratio: over the
    baseline, None where there is none."""

    cell: Cell
    num_repeats: int
    rate: Spread
    ratio: Spread | None
    tau: float | None
    cycle_ms: dict[str, float] | None
    occupancy: float | None
    peak_memory_bytes: int
    load_s: float
    warmup_s: float

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def make_lines(store: Store, cells: Sequence[Cell], repeats: Sequence[int], baseline: dict[str, Any]) -> list[Line]:
    """Of the cells that are measured."""
    lines = []
    for cell in cells:
        found = [m for repeat in repeats if (m := store.get(cell, repeat))]
        if not found:
            continue
        base = find_baseline(cell, baseline, cells)
        over = [] if base is None else ratios(store, cell, base, repeats)
        lines.append(
            Line(
                cell=cell,
                num_repeats=len(found),
                rate=spread([m.rate for m in found]),
                ratio=spread(over) if over else None,
                tau=_median(found, lambda m: m.tau),
                cycle_ms=_cycle_ms(found),
                occupancy=_median(found, lambda m: m.occupancy),
                peak_memory_bytes=max(m.figures.peak_memory_bytes for m in found),
                load_s=_median(found, lambda m: m.figures.load_s),
                warmup_s=_median(found, lambda m: m.figures.warmup_s),
            )
        )
    return lines


def render(lines: Sequence[Line]) -> str:
    """One table for each workload."""
    out = io.StringIO()
    width = max(_MIN_WIDTH, shutil.get_terminal_size((_PLAIN_WIDTH, 0)).columns)
    console = Console(file=out, width=width)
    for workload in dict.fromkeys(line.cell.workload for line in lines):
        of_it = [line for line in lines if line.cell.workload == workload]
        table = Table(title=of_it[0].cell.workload_name, title_justify="left", box=box.SIMPLE_HEAD)
        for name in (
            "batch",
            "what",
            "tokens/s",
            "over baseline",
            "tau",
            *(f"{name} ms" for name in (*PHASES, "rest")),
            "slots",
            "MiB",
            "n",
        ):
            is_name = name == "what"
            table.add_column(name, justify="left" if is_name else "right", no_wrap=is_name)
        for line in of_it:
            table.add_row(*_columns(line))
        console.print(table)
    return out.getvalue().rstrip("\n")


def _columns(line: Line) -> list[str]:
    ratio = line.ratio
    cycle = line.cycle_ms or {}
    return [
        str(line.cell.batch),
        line.cell.variant,
        f"{line.rate.median:.1f}",
        "" if ratio is None else f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]",
        "" if line.tau is None else f"{line.tau:.2f}",
        *(f"{cycle[name]:.2f}" if name in cycle else "" for name in (*PHASES, "rest")),
        "" if line.occupancy is None else f"{100 * line.occupancy:.0f}%",
        f"{line.peak_memory_bytes / 2**20:.0f}",
        str(line.num_repeats),
    ]


def _cycle_ms(found: Sequence[Measurement]) -> dict[str, float] | None:
    """The rest is that of all passes, as it is in none of them."""
    per_cycle = {}
    for name in (*PHASES, "rest"):
        value = _median(found, lambda m, name=name: _per_pass(m, name))
        if value is None:
            return None
        per_cycle[name] = value
    return per_cycle


def _per_pass(measurement: Measurement, name: str) -> float | None:
    figures = measurement.figures
    num_passes = figures.num_passes if name == "rest" else figures.num_cycle_passes
    return 1000 * getattr(figures, f"{name}_s") / num_passes if num_passes else None


def _median(found: Sequence[Measurement], of: Callable[[Measurement], float | None]) -> float | None:
    values = [value for m in found if (value := of(m)) is not None]
    return float(np.median(values)) if values else None
