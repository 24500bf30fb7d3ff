"""The input of a chaos job: few rows, and among them everything awkward."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

_BIG, _SMALL = 150, 40  # records of the one large file, and of each of the others
_LONG_S = 3.0  # of a row that takes long
_LONGEST = 400  # words, more than the tiny model has positions


def write_input(folder: Path, kind: str, *, broken_until: float | None = None, scale: float = 1.0) -> None:
    """Writes JSONL (plain and compressed), CSV, text and Parquet files.

    kind: of the engine. broken_until: the time, in seconds since 1970, before which a third of the fake engine's rows fail.
    scale: of the number of records.
    """
    folder.mkdir(parents=True)
    make_prompt = _Prompts(broken_until, long_s=max(1.0, scale * _LONG_S)).fake if kind == "fake" else _real_prompt
    big, small = max(30, int(scale * _BIG)), max(8, int(scale * _SMALL))
    (folder / "big.jsonl").write_bytes(_lines("big", big, make_prompt))
    (folder / "more.jsonl.gz").write_bytes(gzip.compress(_lines("more", small, make_prompt)))
    rows = [{"id": f"cell{number}", "prompt": make_prompt(number)} for number in range(small // 2)]
    (folder / "cells.csv").write_text("id,prompt\n" + "".join(f"{row['id']},{row['prompt']}\n" for row in rows))
    (folder / "lines.txt").write_text("".join(make_prompt(number) + "\n" for number in range(small // 2)))
    rows = [
        {"id": 1000 + number, "prompt": make_prompt(number), "params": '{"n": 2}' if number % 5 == 0 else None} for number in range(small)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "table.parquet", row_group_size=10)


def _lines(name: str, num_records: int, make_prompt: Callable[[int], str]) -> bytes:
    lines = []
    for number in range(num_records):
        record: dict = {"id": f"{name}{number}", "prompt": make_prompt(number)}
        if number % 9 == 0:
            del record["id"]
        if number % 11 == 0:
            record["params"] = {"n": 3}
        if number % 14 == 3:
            record["params"] = {"max_tokens": 4}
        if number % 23 == 5:
            record["params"] = {"temperature": -1}
        if number % 17 == 2:
            record["prompt"] = ""
        line = json.dumps(record)
        lines.append(line[: len(line) // 2] if number % 29 == 7 else line)
    return "".join(line + "\n" for line in lines).encode()


class _Prompts:
    """For the fake engine, whose rows take no time unless they are told to."""

    def __init__(self, broken_until: float | None, long_s: float):
        self._broken_until = broken_until
        self._long_s = long_s

    def fake(self, number: int) -> str:
        draw = random.Random(number)
        marks = [f"[[fake:slow={draw.uniform(0.05, 0.3):.3f}]]"]
        if number % 41 == 20:
            marks = [f"[[fake:slow={self._long_s:.3f}]]"]
        if number % 19 == 4:
            marks.append("[[fake:row_error]]")
        if self._broken_until is not None and number % 3 == 0:
            marks.append(f"[[fake:broken_until={self._broken_until:.0f}]]")
        return f"{' '.join(marks)} row {number}"


def _real_prompt(number: int) -> str:
    """Words of the tiny model's tokenizer."""
    draw = random.Random(number)
    num_words = _LONGEST if number % 37 == 11 else draw.randint(1, 60)
    return " ".join(f"w{draw.randrange(1, 8)}" for _ in range(num_words))
