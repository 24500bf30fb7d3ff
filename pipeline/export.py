"""`rheo export`: the rows of an output as JSON Lines, one object per row, in the order of the parts."""

from __future__ import annotations

import json
import math
from typing import TextIO

from engine.errors import UserError
from pipeline import runfile
from pipeline.folders import open_folder
from pipeline.parts import list_parts, open_part

FORMATS = ("jsonl",)

_BATCH_ROWS = 256


def export_rows(output: str, to: TextIO) -> None:
    """Writes every column; `meta` as an object. Raises UserError when `output` holds no run, EngineError for a part that cannot be read."""
    folder = open_folder(output)
    if runfile.read(folder) is None:
        raise UserError(f"'{output}' holds no run: there is no {runfile.NAME} in it; allowed: the output.path of a job")
    for name in list_parts(folder).values():
        to.writelines(open_part(folder, name, _make_lines))  # not while the part is open: an error of `to` is not the part's


def _make_lines(part) -> list[str]:
    return [_make_line(row) for batch in part.iter_batches(_BATCH_ROWS) for row in batch.to_pylist()]


def _make_line(row: dict) -> str:
    row["meta"] = None if row["meta"] is None else json.loads(row["meta"])
    if row["logprobs"] is not None:  # JSON has no infinities
        row["logprobs"] = [value if math.isfinite(value) else str(value) for value in row["logprobs"]]
    return json.dumps(row, ensure_ascii=False) + "\n"
