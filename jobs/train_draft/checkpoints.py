"""What a training run leaves for the next: its last state, and the one from which the learning rate began to fall."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

LAST, LEVEL = "last.pt", "level.pt"
LOG = "log.jsonl"


def save(folder: Path, name: str, state: dict[str, Any]) -> None:
    """The whole file or none of it."""
    staged = folder / f"{name}.part"
    torch.save(state, staged)
    os.replace(staged, folder / name)


def load(folder: Path, decay_from: int) -> dict[str, Any] | None:
    """The state to go on from, None at the beginning.

    decay_from: of this run. A state out of another run's fall is passed over for the one before it.
    """
    for name in (LAST, LEVEL):
        if (folder / name).exists():
            state = torch.load(folder / name, map_location="cpu", weights_only=True)
            if state["step"] <= state["decay_from"] or state["decay_from"] == decay_from:
                return state
    return None


def last_step(folder: Path) -> int:
    """Of the last state; 0 where there is none."""
    path = folder / LAST
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)["step"] if path.exists() else 0


def cut_log(folder: Path, step: int) -> None:
    """Drops what the log says of steps that will be made again."""
    path = folder / LOG
    if path.exists():
        kept = [line for line in path.read_text().splitlines() if line.endswith("}") and json.loads(line)["step"] <= step]
        path.write_text("".join(line + "\n" for line in kept))


def append_log(folder: Path, entry: dict[str, Any]) -> None:
    with open(folder / LOG, "a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Entries of training, with `loss`, and of validation, with `validation`."""
    path = folder / LOG
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
