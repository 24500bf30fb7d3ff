"""The systems of a bench, each loaded when it is first measured and kept, and the measurements that they make."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from engine.models.folder import find_length_limit, read_config
from engine.models.loading import load_tokenizer
from engine.options import resolve_max_model_len
from engine.pair import FoundPair, find_pair
from jobs.throughput.bare_engine import BareEngine
from jobs.throughput.cell import Cell, make_cells, require_baseline
from jobs.throughput.config import BenchConfig
from jobs.throughput.measurement import Measurement, System
from jobs.throughput.peer import Peer
from jobs.throughput.pipeline_job import PipelineJob
from jobs.throughput.prompts import PromptPool, read_texts
from jobs.throughput.store import Store
from pipeline.notes import tell


class Session:
    """Raises UserError for what is wrong with the options, before anything is loaded; of `store`, where it was begun with others.

    cells: of the grid, in the order in which they are measured.
    """

    def __init__(self, config: BenchConfig, folder: Path, store: Store, found: FoundPair, cells: Sequence[Cell]):
        self.config, self.store, self.found, self.cells = config, store, found, cells
        self._folder = folder
        self._systems: dict[str, System] = {}
        limit = resolve_max_model_len(config.model.max_model_len, find_length_limit(read_config(found.target.path)))
        tokenizer = load_tokenizer(found.target.path, found.target.chat_template)
        self._pool = PromptPool(read_texts(config.prompts.path), tokenizer, limit)
        for cell in cells:
            self._prompts(cell, repeat=0)
        store.require_same(config, self.facts)

    @property
    def facts(self) -> dict[str, Any]:
        """What "auto" and the environment come to."""
        found = self.found
        return {
            "dtype": str(found.dtype).removeprefix("torch."),
            "device": str(found.device),
            "threads": torch.get_num_threads(),
        }

    def measure(self, cells: Sequence[Cell], repeat: int) -> None:
        """One round; what is measured already is left out. Odd rounds go the other way round, so that a drift favours nobody.

        Raises EngineError where a system fails.
        """
        for cell in cells if repeat % 2 == 0 else list(reversed(cells)):
            if self.store.get(cell, repeat):
                continue
            started_at = time.time()
            figures = self._system(cell.system).measure(cell, self._prompts(cell, repeat), repeat)
            measurement = Measurement(cell=cell, repeat=repeat, started_at=started_at, figures=figures)
            self.store.add(measurement)
            tell(f"rheo: round {repeat + 1}, batch {cell.batch}, {cell.variant} ({cell.workload_name}): {measurement.rate:.1f} tokens/s")

    def close(self) -> None:
        for system in self._systems.values():
            system.close()

    def _prompts(self, cell: Cell, repeat: int) -> list[list[int]]:
        """The same for every system and method; other ones in each round, as far as there are."""
        num_rows = self.config.num_rows(cell.batch)
        return self._pool.take(repeat * num_rows, num_rows, num_tokens=cell.prompt_tokens, num_output=cell.output_tokens)

    def _system(self, name: str) -> System:
        if name not in self._systems:
            self._systems[name] = self._make_system(name)
        return self._systems[name]

    def _make_system(self, name: str) -> System:
        config, found = self.config, self.found
        if name == "engine":
            started = time.perf_counter()
            pair = found.load()
            return BareEngine(pair, load_s=time.perf_counter() - started, seed=config.job.seed)
        if name == "pipeline":
            folder = self._folder / "pipeline"
            return PipelineJob(config.model, self._pool, folder, num_threads=torch.get_num_threads(), seed=config.job.seed)
        setup = {
            "target": str(found.target.path),
            "draft": None if found.draft is None or found.draft.path is None else str(found.draft.path),
            "draft_kind": None if found.draft is None else found.draft.kind,
            "dtype": self.facts["dtype"],
            "device": self.facts["device"],
            "num_threads": torch.get_num_threads(),
            "max_batch": max(config.grid.batch),
            "seed": config.job.seed,
        }
        return Peer(name, config.peers[name], setup, self._folder / f"{name}.log")


@contextmanager
def open_session(config: BenchConfig, folder: Path, choose: Callable[[list[Cell]], list[Cell]] = list) -> Iterator[Session]:
    """choose: from the cells of the grid those to be measured; may raise UserError."""
    model = config.model
    needs_draft = set(config.grid.method) != {"off"} or "vllm-eagle3" in config.peers
    found = find_pair(
        model.target,
        model.draft,
        method="rheo" if needs_draft else "off",
        revision=model.revision,
        dtype=model.dtype,
        device=model.device,
        attention=model.attention,
        max_model_len=model.max_model_len,
    )
    cells = choose(make_cells(config, found.target.preset))
    for cell in cells:
        if cell.method is not None:
            found.settle(cell.speculation)
    require_baseline(config.measure.baseline, cells)
    session = Session(config, folder, Store(folder), found, cells)
    try:
        yield session
    finally:
        session.close()
