"""`rheo export`: the rows of an output as JSON Lines, one object per row, in the order of the parts."""

from __future__ import annotations

import json
import math
from typing import TextIO

from engine.errors import UserError
from pipeline import runfile
from pipeline.folders import explained_failures, open_folder
from pipeline.notes import tell
from pipeline.parts import list_parts, open_part

FORMATS = ("jsonl",)

_BATCH_ROWS = 256


def export_rows(output: str, to: TextIO) -> None:
    """Writes every column; `meta` as an object.

    Raises UserError when `output` holds no run or cannot be reached, EngineError for a part that cannot be read.
    """
    folder = open_folder(output)
    with explained_failures(folder, UserError):
        run = runfile.require(folder)
        names = list_parts(folder).values()
    num_rows = 0
    for name in names:
        with explained_failures(folder, UserError):
            lines = open_part(folder, name, _make_lines)
        to.writelines(lines)  # here, as an error of `to` is not the part's
        num_rows += len(lines)
    if num_rows < run["num_rows"]:
        tell(f"rheo: '{output}' is not finished: these are {num_rows} of {run['num_rows']} rows")


def _make_lines(part) -> list[str]:
    return [_make_line(row) for batch in part.iter_batches(_BATCH_ROWS) for row in batch.to_pylist()]


def _make_line(row: dict) -> str:
    row["meta"] = None if row["meta"] is None else json.loads(row["meta"])
    if row["logprobs"] is not None:  # JSON has no infinities
        row["logprobs"] = [value if math.isfinite(value) else str(value) for value in row["logprobs"]]
    return json.dumps(row, ensure_ascii=False) + "\n"
