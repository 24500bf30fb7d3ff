"""What a measurement has found: integers and seconds, from which rates are made when they are printed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.errors import EngineError
from engine.params import Cycle
from jobs.throughput.cell import Cell

#: output tokens that share a value in tau by position
POSITIONS = 16


@dataclass(kw_only=True)
class Figures:
    """Of one cell once. Lists are empty, and numbers None, where a system does not say.

    seconds: until `num_output_tokens` tokens were there. num_cycles, num_accepted: as in `rheo run`.
    positions: [accepted, cycles] of the cycles that begin in output tokens 0 to 15, 16 to 31, ...
    num_passes, row_passes: target passes, and rows summed over them.
    num_cycle_passes: those in which no row reads its prompt; the `_s` are theirs, but for prefill_s, which is that of all others.
    rest_s: what is in no phase. passes: [tokens in a pass, passes, seconds of the target] of the same.
    """

    num_rows: int
    num_prompt_tokens: int
    num_output_tokens: int
    seconds: float
    load_s: float
    warmup_s: float
    peak_memory_bytes: int
    peak_device_bytes: int | None = None
    num_cycles: int | None = None
    num_accepted: int | None = None
    positions: list[list[int]] = field(default_factory=list)
    num_passes: int | None = None
    row_passes: int | None = None
    num_cycle_passes: int | None = None
    draft_s: float | None = None
    verify_s: float | None = None
    law_s: float | None = None
    commit_s: float | None = None
    prefill_s: float | None = None
    rest_s: float | None = None
    passes: list[list[float]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """repeat: the round that it belongs to. started_at: seconds since 1970."""

    cell: Cell
    repeat: int
    started_at: float
    figures: Figures

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return self.figures.num_output_tokens / self.figures.seconds

    @property
    def tau(self) -> float | None:
        figures = self.figures
        return 1 + figures.num_accepted / figures.num_cycles if figures.num_cycles else None

    @property
    def occupancy(self) -> float | None:
        """Share of the slots that hold a row, over passes."""
        figures = self.figures
        return figures.row_passes / (figures.num_passes * self.cell.batch) if figures.num_passes else None

    def to_row(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self.cell),
            "repeat": self.repeat,
            "started_at": self.started_at,
            **dataclasses.asdict(self.figures),
        }

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Measurement:
        def take(kind: type) -> Any:
            return kind(**{f.name: row[f.name] for f in dataclasses.fields(kind)})

        return cls(cell=take(Cell), repeat=row["repeat"], started_at=row["started_at"], figures=take(Figures))


class System(Protocol):
    """Something that generates. It stays loaded between its measurements."""

    def measure(self, cell: Cell, prompts: Sequence[Sequence[int]], repeat: int) -> Figures:
        """`cell.output_tokens` tokens after each prompt, whatever they are, `cell.batch` rows at a time.

        Raises EngineError where it cannot.
        """
        ...

    def close(self) -> None: ...


def count_cycles(rows: Iterable[Sequence[Cycle]]) -> dict[str, Any]:
    """num_cycles, num_accepted and positions, of the cycles of each row."""
    positions: list[list[int]] = []
    for cycles in rows:
        place = 1  # the first token is the prefill's
        for cycle in cycles:
            while len(positions) <= place // POSITIONS:
                positions.append([0, 0])
            positions[place // POSITIONS][0] += cycle.accepted
            positions[place // POSITIONS][1] += 1
            place += cycle.emitted
    num_accepted, num_cycles = (sum(counts) for counts in zip(*positions, strict=True)) if positions else (0, 0)
    return {"num_cycles": num_cycles, "num_accepted": num_accepted, "positions": positions}


def require_lengths(cell: Cell, figures: Figures) -> Figures:
    """Raises EngineError unless every row has as many tokens as the cell asks for."""
    expected = figures.num_rows * cell.output_tokens
    if figures.num_output_tokens != expected:
        raise EngineError(f"{cell.variant}, batch {cell.batch}: {figures.num_output_tokens} tokens; {expected} were asked for")
    return figures
