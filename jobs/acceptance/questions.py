"""The six 80-question sets of the papers' comparisons, read from a folder of JSONL files with `id` and `turns`; first turns only."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

SETS = ("alpaca", "gsm8k", "humaneval", "mt_bench", "qa", "sum")


@dataclass(frozen=True)
class Question:
    set: str
    id: str
    prompt: str


def read_questions(folder: Path, *, every: int = 1) -> list[Question]:
    """Of each set every n-th question, the first included, in the sets' order."""
    questions = []
    for name in SETS:
        lines = (folder / f"{name}.jsonl").read_text().split("\n")
        records = [json.loads(line) for line in lines if line.strip()][::every]
        questions += [Question(name, record["id"], record["turns"][0]) for record in records]
    return questions
