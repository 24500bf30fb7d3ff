"""Answers that a target wrote, as token ids by the id of their prompt, and without the prompts: small enough to keep.

python -m jobs.train_draft.kept_answers out/smollm2-draft/answers jobs/results/train_draft/answers.parquet
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

_COLUMNS = ("id", "token_ids")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", type=Path, help="an output of rheo run, with one sample of each prompt")
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    keep(args.answers, args.output)
    print(f"{pq.read_metadata(args.output).num_rows} answers in {args.output}")


def keep(answers: Path, output: Path) -> None:
    """Writes `output` from the rows that succeeded."""
    table = pq.read_table(answers / "rows", columns=[*_COLUMNS, "status"])
    kept = table.filter(pc.equal(table["status"], "ok")).select(_COLUMNS).sort_by("id")
    output.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        kept.cast(pa.schema([("id", pa.string()), ("token_ids", pa.list_(pa.int32()))])), output, compression="zstd", compression_level=19
    )


def load(path: Path) -> dict[str, list[int]]:
    """The token ids of each answer, by the id of its prompt."""
    columns = pq.read_table(path).to_pydict()
    return dict(zip(*(columns[name] for name in _COLUMNS), strict=True))


if __name__ == "__main__":
    main()
