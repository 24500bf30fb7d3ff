"""OUT/train_draft.json: the options that what is there depends on. The others may differ from run to run, as the number of steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.errors import UserError
from jobs.train_draft.config import TrainDraftConfig
from pipeline.config_file import option_names

NAME = "train_draft.json"

_FIXED = ("job.seed", "model.target", "model.revision", "model.dtype", "answers.", "draft.", "train.validation", "input.", "sampling.")


def require_same(out: Path, config: TrainDraftConfig) -> None:
    """Notes the options of a new output. Raises UserError, with both values, for one that differs from those of what is there."""
    options = _read_options(config)
    path = out / NAME
    if not path.exists():
        path.write_text(json.dumps(options, indent=1) + "\n")
        return
    for name, value in json.loads(path.read_text()).items():
        if options.get(name) != value:
            raise UserError(
                f"{name}={options.get(name)!r}, and '{out}' was begun with {value!r}; allowed: the same, or another output.path"
            )


def forget_unless_begun(out: Path) -> None:
    """Removes the options of an output that has no answer yet, as those that were refused may have to be put right."""
    if not any((out / "answers").glob("rows/*")):
        (out / NAME).unlink(missing_ok=True)


def _read_options(config: TrainDraftConfig) -> dict[str, Any]:
    found = {}
    for option in option_names(TrainDraftConfig):
        if option.startswith(_FIXED):
            value: Any = config
            for part in option.split("."):
                value = getattr(value, part)
            found[option] = value
    return json.loads(json.dumps(found))  # as it will be read
