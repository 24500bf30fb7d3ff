"""The engine alone, in this process: all cells over one pair, which is loaded once."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from engine import Engine, Request, SamplingParams
from engine.errors import EngineError
from engine.pair import Pair
from engine.params import Result
from engine.stopwatch import PHASES, Stopwatch
from jobs.throughput.cell import Cell
from jobs.throughput.measurement import Figures, count_cycles, require_lengths
from jobs.throughput.memory import PeakMemory

_WARMUP_TOKENS = 8  # a few cycles of each kind of pass


class BareEngine:
    """Each measurement has an engine of its own, with empty caches. A cell's first one in this process is warmed up before.

    Args:
        pair: as it was loaded, which took `load_s`.
    """

    def __init__(self, pair: Pair, *, load_s: float, seed: int):
        self._pair, self._load_s, self._seed = pair, load_s, seed
        self._warm: dict[Cell, float] = {}

    def measure(self, cell: Cell, prompts: Sequence[Sequence[int]], repeat: int) -> Figures:
        if cell not in self._warm:
            started = time.perf_counter()
            self._generate(self._engine(cell), cell, prompts[: cell.batch], repeat, min(_WARMUP_TOKENS, cell.output_tokens))
            self._warm[cell] = time.perf_counter() - started
        watch = Stopwatch(self._pair.found.device)
        engine = self._engine(cell, watch)
        gc.collect()
        is_cuda = self._pair.found.device.type == "cuda"
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        with PeakMemory(os.getpid(), children=False) as peak:
            started = time.perf_counter()
            results = self._generate(engine, cell, prompts, repeat, cell.output_tokens)
            seconds = time.perf_counter() - started
        figures = Figures(
            num_rows=len(prompts),
            num_prompt_tokens=sum(map(len, prompts)),
            num_output_tokens=sum(len(result.token_ids) for result in results),
            seconds=seconds,
            load_s=self._load_s,
            warmup_s=self._warm[cell],
            peak_memory_bytes=peak.bytes,
            peak_device_bytes=torch.cuda.max_memory_allocated() if is_cuda else None,
            **count_cycles(result.cycles for result in results),
            **split_time(watch, seconds),
        )
        return require_lengths(cell, figures)

    def close(self) -> None:
        """Nothing outlives a measurement."""

    def _engine(self, cell: Cell, watch: Stopwatch | None = None) -> Engine:
        return Engine.over(self._pair, speculation=cell.speculation, max_batch=cell.batch, seed=self._seed, watch=watch)

    def _generate(self, engine: Engine, cell: Cell, prompts: Sequence[Sequence[int]], repeat: int, num_output: int) -> list[Result]:
        params = SamplingParams(temperature=cell.temperature, max_tokens=num_output, ignore_eos=True)
        results = engine.generate(Request(id=f"{repeat}-{row}", token_ids=prompt, params=params) for row, prompt in enumerate(prompts))
        for result in results:
            if result.error is not None:
                raise EngineError(f"{cell.variant}, batch {cell.batch}: row {result.id} failed: {result.error.message}")
        return results


def split_time(watch: Stopwatch, seconds: float) -> dict[str, Any]:
    """The time of all passes by phase, what is in none of them, and the target's cost by tokens in a pass."""
    totals: Counter = Counter()
    costs: dict[int, list[float]] = {}
    cycle_passes = 0
    for timed in watch.passes:
        phases = timed.seconds()
        if timed.reads_prompt:
            totals["prefill"] += sum(phases.values())
            continue
        cycle_passes += 1
        totals.update(phases)
        cost = costs.setdefault(timed.num_tokens, [timed.num_tokens, 0, 0.0])
        cost[1] += 1
        cost[2] += phases["verify"]
    return {
        "num_passes": len(watch.passes),
        "row_passes": sum(timed.num_rows for timed in watch.passes),
        "num_cycle_passes": cycle_passes,
        **{f"{name}_s": float(totals[name]) for name in (*PHASES, "prefill")},
        "rest_s": seconds - sum(totals.values()),
        "passes": [costs[num_tokens] for num_tokens in sorted(costs)],
    }
