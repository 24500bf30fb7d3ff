"""What is measured already: a line of OUT/measurements.jsonl as soon as it is; OUT/measurements.parquet is made of these lines."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from engine.errors import UserError
from jobs.throughput.cell import Cell
from jobs.throughput.config import BenchConfig
from jobs.throughput.measurement import Measurement

_OPTIONS = "options.json"
_LINES = "measurements.jsonl"
_TABLE = "measurements.parquet"

_INTEGERS = (
    *("batch", "tree_size", "depth", "m", "prompt_tokens", "output_tokens", "repeat"),
    *("num_rows", "num_prompt_tokens", "num_output_tokens", "peak_memory_bytes", "peak_device_bytes", "num_cycles", "num_accepted"),
    *("num_passes", "row_passes", "num_cycle_passes"),
)
_NUMBERS = (
    *("temperature", "started_at", "seconds", "load_s", "warmup_s"),
    *("draft_s", "verify_s", "law_s", "commit_s", "prefill_s", "rest_s"),
)
_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("system", "method")),
        *((name, pa.int64()) for name in _INTEGERS),
        *((name, pa.float64()) for name in _NUMBERS),
        ("positions", pa.list_(pa.list_(pa.int64()))),
        ("passes", pa.list_(pa.list_(pa.float64()))),
        ("versions", pa.map_(pa.string(), pa.string())),
    ]
)


class Store:
    """Args:
    folder: that nobody else writes to.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._found = {(m.cell, m.repeat): m for m in map(Measurement.from_row, _read_lines(folder / _LINES))}

    def get(self, cell: Cell, repeat: int) -> Measurement | None:
        return self._found.get((cell, repeat))

    def of_cell(self, cell: Cell) -> list[Measurement]:
        """By repeat."""
        return sorted((m for m in self._found.values() if m.cell == cell), key=lambda m: m.repeat)

    def add(self, measurement: Measurement) -> None:
        """Durable when it returns."""
        with (self._folder / _LINES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(measurement.to_row()) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._found[measurement.cell, measurement.repeat] = measurement

    def write_table(self) -> Path:
        """One row per cell and repeat, whether this command's options have it or an earlier one's."""
        rows = [{**m.to_row(), "versions": list(m.figures.versions.items())} for m in self._found.values()]
        path = self._folder / _TABLE
        pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), path)
        return path

    def require_same(self, config: BenchConfig, facts: dict[str, Any]) -> None:
        """Notes what measurements depend on, beside their cells. Raises UserError, with both values, for what has changed.

        facts: further ones, which are no options.
        """
        measure = config.measure
        now = {
            "job.seed": config.job.seed,
            **{f"model.{name}": value for name, value in dataclasses.asdict(config.model).items()},
            "prompts.path": config.prompts.path,
            "measure.rows": measure.rows,
            "measure.rows_per_slot": measure.rows_per_slot,
            **facts,
        }
        path = self._folder / _OPTIONS
        if self._found and path.exists():
            for name, before in json.loads(path.read_text(encoding="utf-8")).items():
                if now[name] != before:
                    raise UserError(
                        f"{name}={now[name]!r}, and what is in '{self._folder}' was measured with {before!r}; "
                        "allowed: the same, or another output.path"
                    )
        path.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Raises UserError for a file of another kind. What a killed run has left of a line is cut off."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        os.truncate(path, len(whole))
    try:
        return [json.loads(line) for line in whole.splitlines()]
    except ValueError as error:
        raise UserError(f"'{path}' cannot be read: {error}") from None
