"""What it costs to go on with a job of millions of rows: time to the first new row, memory of the driver, time to the end.

    python -m jobs.resume.measure --rows 2000000 --done 0 0.01 0.99

A job on the fake engine is started and killed after its first part; then the share that is to be there is put there by the code that
writes parts, and the job is run again. A run that would take too long is stopped (SIGINT) a while after its first new row.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from jobs.evidence import write_result
from pipeline.done import DoneSet
from pipeline.local_folder import LocalFolder
from pipeline.part_writer import PartWriter
from pipeline.parts import list_parts, read_parts
from pipeline.row_numbers import RowNumbers

_PART_ROWS = 2048
_WATCH_S = 20.0  # of a run that is not to come to its end
_END_AT = 0.9  # shares above this are run to their end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--done", type=float, nargs="*", default=[0.0, 0.01, 0.99])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rheo-resume-") as folder:
        job = _make_job(Path(folder), args.rows)
        runs = []
        for share in args.done:
            if share:
                _make_done(job, args.rows, share)
            runs.append({"done": share, **_run(job, to_end=share > _END_AT)})
            print(runs[-1], flush=True)
            shutil.rmtree(Path(folder) / "out")
    write_result("resume", {"rows": args.rows, "runs": runs})


def _make_job(folder: Path, num_rows: int) -> Path:
    with open(folder / "in.jsonl", "w", encoding="utf-8") as file:
        for row in range(num_rows):
            file.write(json.dumps({"id": f"row-{row}", "prompt": f"Tell me something about the number {row}.", "topic": "numbers"}) + "\n")
    job = folder / "job.yaml"
    sections = {
        "input": {"path": str(folder / "in.jsonl")},
        "engine": {"kind": "fake", "max_batch": 64},
        "output": {"path": str(folder / "out")},
    }
    job.write_text(json.dumps(sections))  # JSON is YAML
    return job


def _start(job: Path, *overrides: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "pipeline.cli", "run", str(job), *overrides]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def _make_done(job: Path, num_rows: int, share: float) -> None:
    """Kills a run after its first part, and writes copies of its rows under the keys of those that are to be there."""
    out = job.parent / "out"
    process = _start(job, "output.rows_per_file=64")
    while not list(out.glob("rows/*.parquet")):
        time.sleep(0.2)
        if process.poll() is not None:
            raise SystemExit(process.stderr.read())
    process.kill()
    process.communicate()
    folder, numbers = LocalFolder(str(out)), RowNumbers()
    numbers.add_run(0, 1)
    numbers.close(num_rows)
    names = list_parts(folder)
    done = DoneSet(num_rows)
    for part in read_parts(folder, names.values()):
        done.add(numbers(part.row_index, part.sample))
    run_id = json.loads(folder.read("run.json"))["run_id"]
    writer = PartWriter(
        folder, run_id=run_id, earlier_runs=set(), dropped_runs=set(), row_numbers=numbers, done=done, next_part=max(names) + 1,
        before_first=lambda: None,
    )  # fmt: skip
    sample = pq.read_table(out / next(iter(names.values())))
    rows = np.sort(np.random.default_rng(0).permutation(num_rows)[: int(share * num_rows)])  # not one run of rows: holes everywhere
    for start in range(0, len(rows), _PART_ROWS):
        keys = rows[start : start + _PART_ROWS]
        table = sample.take(pa.array(np.arange(len(keys)) % sample.num_rows))
        for name, values in (("row_index", pa.array(keys)), ("id", pa.array([f"row-{key}" for key in keys]))):
            table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), values)
        writer.write(table)


def _run(job: Path, *, to_end: bool) -> dict:
    started_at = time.monotonic()
    process = _start(job)
    measured = {"parts_at_start": len(list((job.parent / "out").glob("rows/*.parquet")))}
    peak = [0]

    def watch() -> None:
        while process.poll() is None:
            try:
                peak[0] = max(peak[0], psutil.Process(process.pid).memory_info().rss)
            except psutil.NoSuchProcess:
                return
            time.sleep(0.2)

    threading.Thread(target=watch, daemon=True).start()
    for line in process.stderr:
        seconds = time.monotonic() - started_at
        if "records in" in line:
            measured["scanned_s"] = round(seconds, 1)
        if "first new rows" in line:
            measured["first_row_s"] = round(seconds, 1)
            if not to_end:
                threading.Timer(_WATCH_S, process.send_signal, [signal.SIGINT]).start()
        if "rows/s" in line:
            measured["progress"] = line.strip()
    process.wait()
    run = json.loads((job.parent / "out" / "run.json").read_text())
    return {
        **measured,
        "exit_code": process.returncode,
        "total_s": round(time.monotonic() - started_at, 1),
        "peak_driver_mib": peak[0] >> 20,
        "rows_at_end": run["counts"]["rows"],
        "status": run["status"],
    }


if __name__ == "__main__":
    main()
