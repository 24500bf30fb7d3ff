"""A prompt set to train on, drawn from several files: some records of each, with their prompts or messages only. Short ones
come first: rows that run together are as long as the longest of them.

python -m jobs.train_draft.mix ../shared/data/train out/mix.jsonl gsm8k_train=2500 nq_open=2500 --longest 4000
python -m jobs.train_draft.mix ../shared/data/train out/mix.jsonl gsm8k_train nq_open --answers jobs/results/train_draft/answers.parquet
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from pathlib import Path

from jobs.train_draft.kept_answers import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of NAME.jsonl.gz files")
    parser.add_argument("output", type=Path)
    parser.add_argument("parts", nargs="+", metavar="NAME[=RECORDS]", help="all records without a number")
    parser.add_argument("--longest", type=int, default=4000, help="characters of a prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--answers", type=Path, help="of jobs.train_draft.kept_answers: only prompts that have one there, and it")
    args = parser.parse_args()
    answers = load(args.answers) if args.answers else None
    rng = random.Random(args.seed)
    records = []
    for part in args.parts:
        name, _, number = part.partition("=")
        found = [record for record in _read(args.folder / f"{name}.jsonl.gz") if _length(record) <= args.longest]
        if answers is not None:
            found = [{**record, "token_ids": answers[record["id"]]} for record in found if record["id"] in answers]
        records += rng.sample(found, min(int(number), len(found))) if number else found
    records.sort(key=_length)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text("".join(json.dumps(record) + "\n" for record in records))
    print(f"{len(records)} prompts in {args.output}")


def _length(record: dict) -> int:
    return len(json.dumps(record))


def _read(path: Path):
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            yield {name: record[name] for name in ("id", "prompt", "messages") if name in record}


if __name__ == "__main__":
    main()
