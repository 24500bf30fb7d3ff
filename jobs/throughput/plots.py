"""Three pictures of the measurements, one panel for each workload: throughput by batch, tau by position, cost of a pass by its tokens."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture
from matplotlib.ticker import LogLocator, ScalarFormatter

from jobs.throughput.cell import Cell
from jobs.throughput.measurement import POSITIONS
from jobs.throughput.store import Store
from jobs.throughput.table import Line

_PANEL_INCHES = (7.0, 4.5)
_COLUMNS = 2


def plot_all(folder: Path, store: Store, lines: Sequence[Line]) -> list[Path]:
    """Writes the PNG files, but for those that would be empty."""
    cells = [line.cell for line in lines]
    return [
        *_plot(folder / "throughput_by_batch.png", cells, lambda axes, workload: _draw_rates(axes, lines, workload)),
        *_plot(folder / "tau_by_position.png", cells, lambda axes, workload: _draw_tau(axes, store, _of(cells, workload))),
        *_plot(folder / "pass_cost.png", cells, lambda axes, workload: _draw_cost(axes, store, _of(cells, workload))),
    ]


def _plot(path: Path, cells: Sequence[Cell], draw: Callable[[Axes, tuple], bool]) -> list[Path]:
    """draw: into a panel, by workload; says whether it had anything to draw."""
    titles = {cell.workload: cell.workload_name for cell in cells}
    num_rows = math.ceil(len(titles) / _COLUMNS)
    num_columns = min(len(titles), _COLUMNS)
    picture = Picture(figsize=(_PANEL_INCHES[0] * num_columns, _PANEL_INCHES[1] * num_rows), layout="constrained")
    has_drawn = False
    for place, (workload, title) in enumerate(titles.items(), start=1):
        axes = picture.add_subplot(num_rows, num_columns, place, title=title)
        axes.grid(alpha=0.3)
        if draw(axes, workload):
            axes.legend(fontsize="small")
            has_drawn = True
    if not has_drawn:
        return []
    picture.savefig(path, dpi=120)
    return [path]


def _of(cells: Sequence[Cell], workload: tuple) -> list[Cell]:
    return [cell for cell in cells if cell.workload == workload]


def _draw_rates(axes: Axes, lines: Sequence[Line], workload: tuple) -> bool:
    by_variant = defaultdict(list)
    for line in lines:
        if line.cell.workload == workload:
            by_variant[line.cell.variant].append(line)
    for variant, of_it in by_variant.items():
        of_it.sort(key=lambda line: line.cell.batch)
        rates = [line.rate for line in of_it]
        bars = [[rate.median - rate.low for rate in rates], [rate.high - rate.median for rate in rates]]
        axes.errorbar([line.cell.batch for line in of_it], [rate.median for rate in rates], bars, marker="o", capsize=3, label=variant)
    axes.set(xscale="log", yscale="log", xlabel="rows at once", ylabel="output tokens per second")
    batches = sorted({line.cell.batch for line in lines})
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.yaxis.set_major_locator(LogLocator(base=2, subs=(1.0, 1.25, 1.5, 1.75)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.minorticks_off()
    return bool(by_variant)


def _draw_tau(axes: Axes, store: Store, cells: Sequence[Cell]) -> bool:
    """Pooled over batches and repeats."""
    by_variant: dict[str, dict[int, Counter]] = defaultdict(lambda: defaultdict(Counter))
    for cell in cells:
        for measurement in store.of_cell(cell) if cell.method != "off" else ():
            for place, (accepted, cycles) in enumerate(measurement.figures.positions):
                by_variant[cell.variant][place].update(accepted=accepted, cycles=cycles)
    for variant, places in by_variant.items():
        tau = {place: 1 + counts["accepted"] / counts["cycles"] for place, counts in sorted(places.items()) if counts["cycles"]}
        axes.plot([(place + 0.5) * POSITIONS for place in tau], list(tau.values()), marker="o", label=variant)
    axes.set(xlabel="position in the output, tokens", ylabel="tau")
    return bool(by_variant)


def _draw_cost(axes: Axes, store: Store, cells: Sequence[Cell]) -> bool:
    """Of the target alone, in passes without prompts."""
    by_variant: dict[str, dict[float, Counter]] = defaultdict(lambda: defaultdict(Counter))
    for cell in cells:
        for measurement in store.of_cell(cell):
            for num_tokens, num_passes, seconds in measurement.figures.passes:
                by_variant[cell.variant][num_tokens].update(passes=num_passes, seconds=seconds)
    for variant, costs in by_variant.items():
        points = [(num_tokens, 1000 * cost["seconds"] / cost["passes"]) for num_tokens, cost in sorted(costs.items())]
        axes.plot(*zip(*points, strict=True), marker=".", linestyle="none", label=variant)
    axes.set(xlabel="tokens in a pass", ylabel="ms of the target")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    return bool(by_variant)
