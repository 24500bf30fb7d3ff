"""A tuned cell as a job file that `rheo run` loads. In a file that is there only `speculation` changes; comments elsewhere stay."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import yaml

from engine.errors import UserError
from jobs.throughput.cell import Cell
from jobs.throughput.config import BenchConfig
from pipeline.config import ModelSection, load_config

_SECTION = "speculation"


def check_job_file(path: Path) -> None:
    """Raises UserError for a file that is no job, or cannot be changed, before hours are spent on what is to be written into it."""
    if path.exists():
        load_config(str(path))
        _replace_section(path, {})
    elif not path.parent.is_dir():
        raise UserError(f"--tune '{path}': there is no folder '{path.parent}'")


def write_job_file(path: Path, config: BenchConfig, cell: Cell) -> None:
    """Sets `speculation` to the cell's; a new file also has the bench's model, prompts, sampling and batch."""
    speculation = {name: value for name in ("method", "tree_size", "depth", "m") if (value := getattr(cell, name)) is not None}
    if path.exists():
        path.write_text(_replace_section(path, speculation), encoding="utf-8")
        return
    defaults = dataclasses.asdict(ModelSection())
    model = {name: value for name, value in dataclasses.asdict(config.model).items() if value != defaults[name]}
    if cell.method == "off":
        model.pop("draft", None)  # which it would not use
    sections = {
        "input": {"path": config.prompts.path},
        "model": {"target": config.model.target, **model},
        "sampling": {"temperature": cell.temperature, "max_tokens": cell.output_tokens},
        _SECTION: speculation,
        "engine": {"max_batch": cell.batch},
        "output": {"path": f"out/{path.stem}"},
    }
    head = "# Tuned by `rheo bench --tune`: give it your own input and output.\n"
    path.write_text(head + "".join(f"{name}: {_flow(values)}\n" for name, values in sections.items()), encoding="utf-8")


def _replace_section(path: Path, values: dict[str, Any]) -> str:
    """The text of a job file with the section in one line: from its own line to the next one that is not indented, or at the end.

    Raises UserError where that would change another section too, as where a map goes on in lines that are not indented.
    """
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if re.match(rf"{_SECTION}\s*:", line)), len(lines))
    end = start + 1
    while end < len(lines) and lines[end].startswith((" ", "\t")):
        end += 1
    changed = "\n".join([*lines[:start], f"{_SECTION}: {_flow(values)}", *lines[end:], ""])
    if _other_sections(changed) != _other_sections(text):
        raise UserError(f"--tune '{path}': '{_SECTION}' does not end where its indented lines end; allowed: a section of indented lines")
    return changed


def _other_sections(text: str) -> dict[str, Any] | None:
    try:
        return {name: section for name, section in yaml.safe_load(text).items() if name != _SECTION}
    except yaml.YAMLError:
        return None


def _flow(values: dict[str, Any]) -> str:
    """JSON is YAML: an `off` in quotes is no `false`."""
    return "{" + ", ".join(f"{name}: {json.dumps(value)}" for name, value in values.items()) + "}"
