"""Chi-square of every method's output on the toy pair against exact laws, at full size.

    python -m jobs.statistics.run --rows 200000

The table is written to jobs/results/statistics.json. The tests run the same at 20,000 rows, with mutants.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path

import torch

from jobs.evidence import write_result
from jobs.statistics.chi_square import CASES, exact_laws, load_toy_engine, run_case
from jobs.statistics.toy_pair import build_toy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)  # thousands of tiny operations: threads only wait for each other
    with tempfile.TemporaryDirectory() as folder:
        toy = build_toy(Path(folder))
        laws = exact_laws(toy.target)
        cases = {}
        for name, case in CASES.items():
            result = run_case(load_toy_engine(toy, case), laws, args.rows, args.seed)
            cases[name] = {
                "tau": round(result.tau, 3),
                "least_p_value": result.least_p_value,
                "tests": [dataclasses.asdict(outcome) for outcome in result.outcomes],
            }
            print(f"{name:32} tau {result.tau:.3f}  least p-value {result.least_p_value:.4f}  {result.seconds:.0f} s", flush=True)
    num_tests = sum(len(case["tests"]) for case in cases.values())
    least = min(case["least_p_value"] for case in cases.values())
    level = 0.01 / num_tests
    print(f"{num_tests} tests, least p-value {least:.5f}, Bonferroni level {level:.6f}: {'passed' if least > level else 'FAILED'}")
    figures = {"rows": args.rows, "seed": args.seed, "bonferroni_level": level, "least_p_value": least, "passed": least > level}
    write_result("statistics", {**figures, "cases": cases})


if __name__ == "__main__":
    main()
