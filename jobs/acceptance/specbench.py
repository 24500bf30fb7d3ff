"""tau of each method on the six question sets, through `rheo run`.

    python -m jobs.acceptance.specbench ../shared/data/specbench --every 3 --seeds 0 1 2

An arm is one method with one seed. What each question's cycles came to is written to jobs/results/specbench/ARM.json, and an arm that is
there is not run again, so the job can be stopped at any time. The table, with intervals over prompts, goes to jobs/results/specbench.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from jobs.acceptance.intervals import gain, tau_table
from jobs.acceptance.questions import Question, read_questions
from jobs.evidence import RESULTS, write_result

METHODS = {
    "topk": ["speculation.method=topk"],
    "rheo m=0": ["speculation.method=rheo", "speculation.m=0"],
    "rheo m=1": ["speculation.method=rheo", "speculation.m=1"],
    "rheo m=2": ["speculation.method=rheo", "speculation.m=2"],
    "coupled": ["speculation.method=coupled"],
}
_JOB = Path(__file__).with_suffix(".yaml")
_ARMS = RESULTS / "specbench"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with alpaca.jsonl, gsm8k.jsonl, ...")
    parser.add_argument("--every", type=int, default=1, help="of each set every n-th question")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("out/specbench"))
    parser.add_argument("--override", action="append", default=[], metavar="KEY=VALUE", help="passed to rheo run")
    args = parser.parse_args()
    questions = read_questions(args.folder, every=args.every)
    args.out.mkdir(parents=True, exist_ok=True)
    _ARMS.mkdir(parents=True, exist_ok=True)
    questions_file = args.out / "questions.jsonl"
    questions_file.write_text("".join(json.dumps({"id": q.id, "prompt": q.prompt, "set": q.set}) + "\n" for q in questions))
    arms = {}
    for seed in args.seeds:
        for method, overrides in METHODS.items():
            name = f"{method.replace(' ', '-')}-seed{seed}"
            command = [f"input.path={questions_file}", f"output.path={args.out / name}", *overrides, f"job.seed={seed}", *args.override]
            arms[method, seed] = _arm(name, args.out / name, command, questions)
    sums = {method: _sums_by_set(questions, [arms[method, seed] for seed in args.seeds]) for method in METHODS}
    write_result(
        "specbench",
        {
            "questions": len(questions),
            "seeds": args.seeds,
            "rows": len(questions) * len(args.seeds) * len(METHODS),
            "tau": {method: tau_table(of_sets) for method, of_sets in sums.items()},
            "over_topk": {method: gain(of_sets, sums["topk"]) for method, of_sets in sums.items() if method != "topk"},
        },
    )


def _arm(name: str, folder: Path, overrides: Sequence[str], questions: Sequence[Question]) -> dict[str, list[int]]:
    """[accepted tokens, cycles, output tokens] of each question, by id; from the arm's file, or by running it."""
    path = _ARMS / f"{name}.json"
    if path.exists():
        figures = json.loads(path.read_text())
        if set(figures) != {question.id for question in questions}:
            raise SystemExit(f"{path} is of other questions; remove it to run the arm again")
        return figures
    if not _is_finished(folder):
        command = ["rheo", "run", str(_JOB), *overrides]
        print("$", " ".join(command), flush=True)
        subprocess.run([str(Path(sys.executable).parent / command[0]), *command[1:]], check=True)
    names = ("num_accepted_tokens", "num_cycles", "num_output_tokens")
    figures = {id: [row[name] for name in names] for id, row in _read_rows(folder, questions).items()}
    path.write_text(json.dumps(figures) + "\n")
    return figures


def _is_finished(folder: Path) -> bool:
    run = folder / "run.json"
    return run.exists() and json.loads(run.read_text())["status"] == "finished"


def _read_rows(folder: Path, questions: Sequence[Question]) -> dict[str, dict]:
    """The rows of an arm by id; every question is there once, and its statistics agree with each other."""
    rows = pq.read_table(folder / "rows").to_pylist()
    by_id = {row["id"]: row for row in rows}
    if len(rows) != len(by_id) or set(by_id) != {question.id for question in questions}:
        raise SystemExit(f"{folder}: {len(rows)} rows with {len(by_id)} ids, {len(questions)} questions")
    for row in rows:
        cycles = row["cycles"]
        consistent = (
            row["status"] == "ok"
            and row["num_output_tokens"] == len(row["token_ids"]) == 1 + sum(cycle["emitted"] for cycle in cycles)
            and row["num_cycles"] == len(cycles) == sum(row["acceptance_histogram"])
            and row["num_accepted_tokens"] == sum(cycle["accepted"] for cycle in cycles)
            and row["num_accepted_tokens"] == sum(count * num for num, count in enumerate(row["acceptance_histogram"]))
            and row["num_draft_tokens"] == sum(cycle["drafted"] for cycle in cycles)
        )
        if not consistent:
            raise SystemExit(f"{folder}: the statistics of row {row['id']} do not agree: {row['status']} {row['error_message']}")
    return by_id


def _sums_by_set(questions: Sequence[Question], arms: Sequence[dict[str, list[int]]]) -> dict[str, np.ndarray]:
    """[prompts, 2] for each set: accepted tokens and cycles, summed over seeds."""
    sums = defaultdict(list)
    for question in questions:
        sums[question.set].append(np.sum([arm[question.id][:2] for arm in arms], 0))
    return {name: np.array(of_set) for name, of_set in sums.items()}


if __name__ == "__main__":
    main()
