"""Cells: what is measured, one combination of the grid's values each."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import UserError
from engine.models.presets import Preset
from engine.params import Speculation
from jobs.throughput.config import SYSTEMS, BenchConfig

#: of transformers, whose assisted generation takes one row at a time
_ONE_ROW_SYSTEMS = ("transformers-assisted",)

#: sizes of a tree, by method: what else is in the grid has no effect on it
_SIZES = {"off": (), "rheo": ("tree_size", "depth", "m")}
_OTHER_SIZES = ("tree_size", "depth")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """system: of `config.SYSTEMS`, or a peer. batch: rows that run at once.

    method: None for a peer. tree_size, depth, m: None where they have no effect. prompt_tokens: None is each prompt as long as it is.
    """

    system: str
    batch: int
    method: str | None
    tree_size: int | None
    depth: int | None
    m: int | None
    temperature: float
    prompt_tokens: int | None
    output_tokens: int

    @property
    def workload(self) -> tuple:
        """What cells must share to be compared, but for the batch."""
        return self.temperature, self.prompt_tokens, self.output_tokens

    @property
    def workload_name(self) -> str:
        length = "own length" if self.prompt_tokens is None else f"{self.prompt_tokens} tokens"
        return f"T={self.temperature:g}, prompts of {length}, {self.output_tokens} tokens out"

    @property
    def variant(self) -> str:
        """What runs, in a few words."""
        words = [] if self.system == "engine" else [self.system]
        words += [self.method] if self.method else []
        words += [f"{self.tree_size}x{self.depth}"] if self.tree_size else []
        words += [f"m={self.m}"] if self.m is not None else []
        return " ".join(words)

    @property
    def speculation(self) -> Speculation:
        """Of a system of rheo's."""
        given = {name: value for name in ("tree_size", "depth", "m") if (value := getattr(self, name)) is not None}
        return Speculation(method=self.method, **given)


def make_cells(config: BenchConfig, preset: Preset | None) -> list[Cell]:
    """All cells of the grid once, those that are compared with each other in a row.

    Raises UserError for a tree that a method cannot have.
    """
    grid = config.grid
    trees = Speculation().with_tree() if preset is None else Speculation().with_tree(preset.tree_size, preset.depth)
    tree_sizes = [trees.tree_size if size is None else size for size in grid.tree_size]
    depths = [trees.depth if depth is None else depth for depth in grid.depth]
    cells: dict[Cell, None] = {}
    workloads = itertools.product(grid.temperature, grid.prompt_tokens, grid.output_tokens, grid.batch)
    for temperature, prompt_tokens, output_tokens, batch in workloads:
        variants = itertools.product(config.systems, grid.method, tree_sizes, depths, grid.m)
        for system, method, tree_size, depth, m in variants:
            if system in _ONE_ROW_SYSTEMS and batch > 1:
                continue
            cell = _only_what_counts(
                system=system,
                batch=batch,
                method=method,
                tree_size=tree_size,
                depth=depth,
                m=m,
                temperature=float(temperature),
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
            )
            if cell.method is not None:
                cell.speculation.check()
            cells[cell] = None
    return list(cells)


def find_baseline(cell: Cell, baseline: dict[str, Any], cells: Sequence[Cell]) -> Cell | None:
    """The cell that `cell` is compared with; None where it is not among `cells`, and for the cell itself."""
    wanted = _only_what_counts(**{**dataclasses.asdict(cell), **baseline})
    return wanted if wanted in cells and wanted != cell else None


def require_baseline(baseline: dict[str, Any], cells: Sequence[Cell]) -> None:
    """Raises UserError where there are several cells, and none has its baseline among them."""
    if len(cells) > 1 and not any(find_baseline(cell, baseline, cells) for cell in cells):
        raise UserError(f"measure.baseline={baseline} is the baseline of none of {len(cells)} cells; allowed: values of the grid, or null")


def _only_what_counts(**values: Any) -> Cell:
    if values["system"] not in SYSTEMS:
        values["method"] = None
    sizes = () if values["method"] is None else _SIZES.get(values["method"], _OTHER_SIZES)
    return Cell(**{name: None if name in ("tree_size", "depth", "m") and name not in sizes else value for name, value in values.items()})
