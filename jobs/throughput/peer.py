"""Other engines: a script under `peers/` each, run by the interpreter that has the engine installed. One line of JSON asks, one answers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from jobs.throughput.cell import Cell
from jobs.throughput.measurement import Figures
from jobs.throughput.memory import PeakMemory

_SCRIPTS = {
    "transformers": "transformers_generate.py",
    "transformers-assisted": "transformers_generate.py",
    "vllm": "vllm_generate.py",
    "vllm-eagle3": "vllm_generate.py",
    "ray-data-llm": "ray_data_llm.py",
}
_FOLDER = Path(__file__).parent / "peers"
_GRACE_S = 20
_LAST_LINES = 5
_WARMUP_TOKENS = 8


class Peer:
    """The process of one peer, from its first measurement to `close`.

    Args:
        setup: what the script is told at its start, as `peers/serving.py` describes it.
        log: a file for all it says but its answers.
    """

    def __init__(self, name: str, python: str, setup: dict[str, Any], log: Path):
        self._name, self._python, self._setup, self._log = name, python, setup, log
        self._process: subprocess.Popen | None = None
        self._loaded: dict[str, Any] = {}
        self._warm: dict[Cell, float] = {}

    def measure(self, cell: Cell, prompts: Sequence[Sequence[int]], repeat: int) -> Figures:
        if self._process is None:
            self._start()
        if cell not in self._warm and not self._loaded["is_pipeline"]:
            first = self._request(cell, prompts[: cell.batch], repeat, min(_WARMUP_TOKENS, cell.output_tokens))
            self._warm[cell] = self._ask(first)["seconds"]
        with PeakMemory(self._process.pid, children=True) as peak:
            answer = self._ask(self._request(cell, prompts, repeat, cell.output_tokens))
        return Figures(
            num_rows=len(prompts),
            num_prompt_tokens=sum(map(len, prompts)),
            num_output_tokens=answer["num_output_tokens"],
            seconds=answer["seconds"],
            load_s=self._loaded["load_s"],
            warmup_s=self._warm.get(cell, 0.0),
            peak_memory_bytes=peak.bytes,
            peak_device_bytes=answer.get("peak_device_bytes"),
            num_cycles=answer.get("num_cycles"),
            num_accepted=answer.get("num_accepted"),
            versions=self._loaded["versions"],
        )

    def close(self) -> None:
        """Ends the process, which ends by itself once nobody can ask any more, and what it has left running."""
        if self._process is None:
            return
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        self._process = None

    def _request(self, cell: Cell, prompts: Sequence[Sequence[int]], repeat: int, num_output: int) -> dict[str, Any]:
        return {
            "prompts": prompts,
            "batch": cell.batch,
            "output_tokens": num_output,
            "temperature": cell.temperature,
            "seed": self._setup["seed"] + repeat,
        }

    def _start(self) -> None:
        num_threads = str(self._setup["num_threads"])
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [self._python, str(_FOLDER / _SCRIPTS[self._name])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # unbuffered: what a peer prints before it is killed is what tells why
                env={**os.environ, "OMP_NUM_THREADS": num_threads, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # Ctrl-C is for the bench
            )
        self._loaded = self._ask({"name": self._name, **self._setup})

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Raises EngineError where the peer says that it failed, and where it has ended."""
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            last = self._log.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:]
            raise EngineError(f"the peer {self._name} ({self._python}) has ended: {' / '.join(last)} (all of it in '{self._log}')")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(f"the peer {self._name} ({self._python}) failed: {answer['error']} (more in '{self._log}')")
        return answer
