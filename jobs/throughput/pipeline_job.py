"""A whole `rheo run` on one worker, in processes of its own, with as many threads as the bare engine has here.

Its seconds are those of the report: from the moment its engine is loaded to the last row. Ray's start, the workers' and the load of the
model are before them (`load_s`); reading, templating, the way of each row through Ray, and the first cycles, for which a job is not warmed
up, are in them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq

from engine.errors import EngineError
from engine.params import Cycle
from jobs.throughput.cell import Cell
from jobs.throughput.measurement import Figures, count_cycles, require_lengths
from jobs.throughput.memory import PeakMemory
from jobs.throughput.prompts import PromptPool
from pipeline.config import ModelSection

_GRACE_S = 30


class PipelineJob:
    """Args:
    pool: spells the prompts, which a job reads as text.
    folder: for a job's files while it runs.
    """

    def __init__(self, model: ModelSection, pool: PromptPool, folder: Path, *, num_threads: int, seed: int):
        self._model, self._pool, self._folder = model, pool, folder
        self._num_threads, self._seed = num_threads, seed

    def measure(self, cell: Cell, prompts: Sequence[Sequence[int]], repeat: int) -> Figures:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        out = self._folder / "out"
        rows = [{"id": f"{repeat}-{row}", "prompt": self._pool.text(prompt)} for row, prompt in enumerate(prompts)]
        (self._folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        (self._folder / "job.yaml").write_text(json.dumps(self._job(cell, out)), encoding="utf-8")
        peak_bytes = self._run()
        run = json.loads((out / "run.json").read_text(encoding="utf-8"))
        found = pq.read_table(out / "rows", columns=["num_prompt_tokens", "num_output_tokens", "cycles"]).to_pylist()
        figures = Figures(
            num_rows=len(found),
            num_prompt_tokens=sum(row["num_prompt_tokens"] for row in found),
            num_output_tokens=sum(row["num_output_tokens"] for row in found),
            seconds=run["timing"]["generate_s"],
            load_s=run["timing"]["load_s"],
            warmup_s=0.0,
            peak_memory_bytes=peak_bytes,
            **count_cycles([Cycle(**cycle) for cycle in row["cycles"]] for row in found),
        )
        shutil.rmtree(self._folder, ignore_errors=True)
        return require_lengths(cell, figures)

    def close(self) -> None:
        """Nothing outlives a measurement, but for the files of one that failed."""

    def _job(self, cell: Cell, out: Path) -> dict:
        speculation = {name: value for name in ("method", "tree_size", "depth", "m") if (value := getattr(cell, name)) is not None}
        model = dataclasses.asdict(self._model)
        return {
            "job": {"seed": self._seed},
            "input": {"path": str((self._folder / "prompts.jsonl").resolve()), "chat": False, "parse_special": True},
            "model": {**model, "draft": "auto"} if cell.method == "off" else model,
            "sampling": {"temperature": cell.temperature, "max_tokens": cell.output_tokens, "ignore_eos": True},
            "speculation": speculation,
            "engine": {"max_batch": cell.batch},
            "ray": {"workers": 1, "threads_per_worker": self._num_threads},
            "output": {"path": str(out.resolve())},
        }

    def _run(self) -> int:
        """The most memory, in bytes, of the job with all its processes. Raises EngineError where a row failed."""
        log = self._folder / "log"
        command = [sys.executable, "-m", "jobs.cli", "run", str(self._folder / "job.yaml")]
        with log.open("w") as file:
            # a session of its own: Ctrl-C is for the bench, which ends the job
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                with PeakMemory(process.pid, children=True) as peak:
                    code = process.wait()
            finally:
                if process.poll() is None:
                    process.terminate()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(_GRACE_S)
        if code != 0:
            said = log.read_text(errors="replace").strip().splitlines()
            raise EngineError(f"`rheo run {self._folder / 'job.yaml'}` ended with {code}: {said[-1] if said else 'it said nothing'}")
        return peak.bytes
