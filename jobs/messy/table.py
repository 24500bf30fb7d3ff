"""`rheo run` on every file of a folder of awkward input: ok rows, error rows with their types, or a refusal.

    python -m jobs.messy.table ../shared/data/messy

Files of long documents (--long) are run once with input.truncate=error and once with left, a file whose records lie in a column is run
once with paths into it, and one that is refused for its repeated ids once with input.id=null. The table is printed as Markdown, and written
with a message of each kind to jobs/results/messy.json; --only runs some files and leaves the others' rows there as they are.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq

from jobs.evidence import RESULTS, write_result

_JOB = Path(__file__).with_name("messy.yaml")
_LONGEST = 3
_NESTED = "record"  # a column that holds whole records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--long", nargs="*", default=["long_documents.jsonl.gz"], help="names of files with long documents")
    parser.add_argument("--out", type=Path, default=Path("out/messy"))
    parser.add_argument("--override", action="append", default=[], metavar="KEY=VALUE", help="passed to rheo run")
    parser.add_argument("--only", nargs="*", help="names of files")
    args = parser.parse_args()
    result = RESULTS / "messy.json"
    runs = json.loads(result.read_text())["runs"] if args.only and result.exists() else []
    for file in sorted(args.folder.iterdir()):
        if args.only and file.name not in args.only:
            continue
        runs = [run for run in runs if run["file"] != file.name]
        ways = [[], *([["input.truncate=left"]] if file.name in args.long else [])]
        for way in ways:  # grows
            run = _run(file, way, args.out / f"{file.name}-{len(ways)}", args.override)
            print(f"| {file.name} | {' '.join(way)} | {run['exit_code']} | {run['ok']} | {_show(run)} |", flush=True)
            runs.append(run)
            if not way and run["refused"] and "repeated ids" in run["refused"]:
                ways.append(["input.id=null"])
            if not way and run["refused"] and f", {_NESTED})" in run["refused"]:
                ways.append(["input.id=null", *(f"input.{name}={_NESTED}.{name}" for name in ("prompt", "messages"))])
    write_result("messy", {"runs": sorted(runs, key=lambda run: (run["file"], run["options"]))})


def _run(file: Path, way: Sequence[str], out: Path, overrides: Sequence[str]) -> dict:
    options = [f"input.path={file}", f"output.path={out}", *way]
    if _format_of(file) is not None:
        options.append(f"input.format={_format_of(file)}")
    command = [str(Path(sys.executable).parent / "rheo"), "run", str(_JOB), *options, *overrides]
    done = subprocess.run(command, capture_output=True, text=True)
    said = [line.removeprefix("rheo: ") for line in done.stderr.splitlines() if line.startswith("rheo: ")]
    run = {"file": file.name, "options": list(way), "exit_code": done.returncode, "ok": 0, "errors": {}, "refused": None}
    if done.returncode == 2:
        return {**run, "refused": said[-1] if said else done.stderr.strip()}
    if done.returncode not in (0, 3, 4):
        raise SystemExit(f"{file}: exit code {done.returncode}\n{done.stderr}")
    rows = pq.read_table(out / "rows", columns=["id", "status", "error_type", "error_message", "num_prompt_tokens"]).to_pylist()
    errors: dict[str, dict] = {}
    for row in sorted((row for row in rows if row["status"] == "error"), key=lambda row: row["id"]):
        of_type = errors.setdefault(row["error_type"], {"rows": 0, "example": f"{row['id']}: {row['error_message']}"})
        of_type["rows"] += 1
    ok = sorted(row["num_prompt_tokens"] for row in rows if row["status"] == "ok")
    return {**run, "ok": len(ok), "errors": errors, "longest_prompts": ok[-_LONGEST:]}


def _format_of(file: Path) -> str | None:
    """Of a file whose name does not say it."""
    return "jsonl" if file.suffix == ".json" else None


def _show(run: dict) -> str:
    if run["refused"]:
        return f"refused: {run['refused']}"
    of_types = [f"{of_type['rows']} {name} ({of_type['example']})" for name, of_type in run["errors"].items()]
    return re.sub(r"\s+", " ", "; ".join(of_types)).replace("|", "\\|")


if __name__ == "__main__":
    main()
