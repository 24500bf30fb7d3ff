"""`rheo run` on every file of a folder of awkward input: ok rows, error rows with their types, or a refusal.

    python -m jobs.messy.table ../shared/data/messy

Files of long documents (--long) are run once with input.truncate=error and once with left. The table is printed as Markdown, and written
with a message of each kind to jobs/results/messy.json.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq

from jobs.evidence import write_result

_JOB = Path(__file__).with_name("messy.yaml")
_LONGEST = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--long", nargs="*", default=["long_documents.jsonl.gz"], help="names of files with long documents")
    parser.add_argument("--out", type=Path, default=Path("out/messy"))
    parser.add_argument("--override", action="append", default=[], metavar="KEY=VALUE", help="passed to rheo run")
    args = parser.parse_args()
    runs = []
    for file in sorted(args.folder.iterdir()):
        for truncate in ("error", "left") if file.name in args.long else ("error",):
            run = _run(file, truncate, args.out / f"{file.name}-{truncate}", args.override)
            print(f"| {file.name} | {truncate} | {run['exit_code']} | {run['ok']} | {_show(run)} |", flush=True)
            runs.append(run)
    write_result("messy", {"runs": runs})


def _run(file: Path, truncate: str, out: Path, overrides: Sequence[str]) -> dict:
    options = [f"input.path={file}", f"output.path={out}", f"input.truncate={truncate}"]
    if _format_of(file) is not None:
        options.append(f"input.format={_format_of(file)}")
    command = [str(Path(sys.executable).parent / "rheo"), "run", str(_JOB), *options, *overrides]
    done = subprocess.run(command, capture_output=True, text=True)
    said = [line.removeprefix("rheo: ") for line in done.stderr.splitlines() if line.startswith("rheo: ")]
    run = {"file": file.name, "truncate": truncate, "exit_code": done.returncode, "ok": 0, "errors": {}, "refused": None}
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
