"""The options of `rheo bench`. `model` means what it does in `rheo run`; every list under `grid` is an axis.

prompts: {path: prompts.jsonl}
grid: {batch: [1, 16], method: [off, rheo]}
output: {path: out/bench}
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from engine.errors import UserError, unknown_name
from engine.params import METHODS, Speculation
from pipeline.config import JobSection, ModelSection
from pipeline.config_file import load_options

#: what can be measured in this rheo: the engine alone, and a whole `rheo run` on one worker
SYSTEMS = ("engine", "pipeline")

#: other engines, each run by the interpreter that `peers` names
PEERS = ("transformers", "transformers-assisted", "vllm", "vllm-eagle3", "ray-data-llm")

_BASELINE = {"system": "engine", "method": "off"}

#: in place of an interpreter's path
THIS = "this"


@dataclass(kw_only=True)
class PromptsSection:
    """path: a JSON Lines file with `prompt`, `turns` (the first is read) or `messages` (the last), a folder of such files, or a list."""

    path: Any = MISSING


@dataclass(kw_only=True)
class GridSection:
    """The axes. tree_size, depth: null is the preset's. prompt_tokens: null is each prompt as long as it is."""

    system: Any = field(default_factory=lambda: ["engine"])
    batch: Any = field(default_factory=lambda: [1, 4, 16])
    method: Any = field(default_factory=lambda: ["off", "rheo"])
    tree_size: Any = field(default_factory=lambda: [None])
    depth: Any = field(default_factory=lambda: [None])
    m: Any = field(default_factory=lambda: [Speculation.m])
    temperature: Any = field(default_factory=lambda: [1.0])
    prompt_tokens: Any = field(default_factory=lambda: [None])
    output_tokens: Any = field(default_factory=lambda: [128])


@dataclass(kw_only=True)
class MeasureSection:
    """repeats: rounds through all cells. rows: of a measurement at least, in whole batches. rows_per_slot: of a measurement at least.

    baseline: the cell that each one is compared with: its own values with these in their place; null leaves its own.
    """

    repeats: int = 5
    rows: int = 8
    rows_per_slot: int = 1
    baseline: dict[str, Any] = field(default_factory=lambda: dict(_BASELINE))


@dataclass(kw_only=True)
class BenchOutput:
    """path: a local folder; what is measured there already is not measured again."""

    path: str = MISSING


@dataclass(kw_only=True)
class BenchConfig:
    """peers: by name, the interpreter that has the peer installed, or `this`."""

    job: JobSection = field(default_factory=JobSection)
    model: ModelSection = field(default_factory=ModelSection)
    prompts: PromptsSection = field(default_factory=PromptsSection)
    grid: GridSection = field(default_factory=GridSection)
    measure: MeasureSection = field(default_factory=MeasureSection)
    peers: dict[str, Any] = field(default_factory=dict)
    output: BenchOutput = field(default_factory=BenchOutput)

    @property
    def systems(self) -> list[str]:
        return [*self.grid.system, *self.peers]

    def num_rows(self, batch: int) -> int:
        """Of a measurement."""
        return batch * max(self.measure.rows_per_slot, -(-self.measure.rows // batch))


def load_bench_config(yaml_path: str, overrides: Sequence[str] = ()) -> BenchConfig:
    """Raises UserError as `pipeline.config_file.load_options` does, and for a value that is not allowed."""
    config = load_options(BenchConfig, yaml_path, overrides)
    grid, measure = config.grid, config.measure
    for name, is_valid, allowed in _AXES:
        values = getattr(grid, name)
        if not isinstance(values, list) or not values:
            raise UserError(f"grid.{name}={values!r}; allowed: a list of at least one value: {allowed}")
        values = [_off(value) for value in values] if name == "method" else values
        setattr(grid, name, values)
        for value in values:
            if not is_valid(value):
                raise UserError(f"grid.{name}={values!r} has {value!r}; allowed: {allowed}")
    for name in ("repeats", "rows", "rows_per_slot"):
        if getattr(measure, name) < 1:
            raise UserError(f"measure.{name}={getattr(measure, name)}; allowed: an integer >= 1")
    _check_baseline(config)
    _check_peers(config)
    if not isinstance(config.prompts.path, str | list) or not config.prompts.path:
        raise UserError(f"prompts.path={config.prompts.path!r}; allowed: a path, or a list of paths")
    return config


def _check_baseline(config: BenchConfig) -> None:
    chosen: dict[str, Any] = {}
    names = [f.name for f in dataclasses.fields(GridSection)]
    for name, value in config.measure.baseline.items():
        if name not in names:
            raise UserError(unknown_name("option in 'measure.baseline'", name, names))
        value = _off(value) if name == "method" else value
        values = config.systems if name == "system" else getattr(config.grid, name)
        # the default stands where the grid has no plain decoding: then nothing is compared
        if value is not None and value not in values and value != _BASELINE.get(name):
            raise UserError(f"measure.baseline.{name}={value!r} is not measured; allowed: {', '.join(map(str, values))}, or null")
        chosen[name] = value
    config.measure.baseline = {name: value for name, value in chosen.items() if value is not None}


def _check_peers(config: BenchConfig) -> None:
    for name, python in config.peers.items():
        if name not in PEERS:
            raise UserError(unknown_name("option in 'peers'", name, PEERS))
        if python == THIS:
            config.peers[name] = sys.executable
        elif not isinstance(python, str) or shutil.which(os.path.expanduser(python)) is None:
            raise UserError(f"peers.{name}={python!r} is no program; allowed: the path of a Python interpreter, or {THIS}")
        else:
            config.peers[name] = os.path.expanduser(python)
    if "transformers-assisted" in config.peers and 1 not in config.grid.batch:
        raise UserError(f"grid.batch={config.grid.batch} with peers.transformers-assisted, which takes one row; allowed: 1 among them")
    if "ray-data-llm" in config.peers and min(config.num_rows(batch) // batch for batch in config.grid.batch) < 2:
        raise UserError(
            f"measure.rows_per_slot={config.measure.rows_per_slot} with peers.ray-data-llm, whose first batch is not timed; allowed: >= 2"
        )


def _off(value: Any) -> Any:
    """A bare `off` in YAML is False."""
    return "off" if value is False else value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _or_null(is_valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_valid(value)


_AXES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("system", lambda v: v in SYSTEMS, ", ".join(SYSTEMS)),
    ("batch", _is_count, "integers >= 1"),
    ("method", lambda v: v in METHODS, ", ".join(METHODS)),
    ("tree_size", _or_null(_is_count), "integers >= 1, or null"),
    ("depth", _or_null(_is_count), "integers >= 1, or null"),
    ("m", lambda v: v == 0 or _is_count(v), "integers >= 0"),
    ("temperature", lambda v: isinstance(v, int | float) and not isinstance(v, bool) and v >= 0, "numbers >= 0"),
    ("prompt_tokens", _or_null(_is_count), "integers >= 1, or null"),
    ("output_tokens", lambda v: _is_count(v) and v >= 2, "integers >= 2"),
)
