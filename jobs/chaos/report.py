"""What is told of a job: its kills, and whatever should not have been."""

from __future__ import annotations

from dataclasses import dataclass, field

from jobs.chaos.judge import Verdict


@dataclass
class Kill:
    """rows, parts, status: what was there then; status: of run.json. window: the write that the driver was in the middle of."""

    victim: str
    signal: str
    moment: str
    age_s: float
    window: str | None = None
    rows: int = 0
    parts: int = 0
    status: str | None = None

    @property
    def ends_driver(self) -> bool:
        return self.signal == "SIGKILL" and self.victim.startswith("driver")

    def describe(self, num_rows: int) -> str:
        return (
            f"{self.signal} to {self.victim} {self.moment}, {self.age_s:.2f} s old; rows done: {self.rows} of {num_rows} in {self.parts} "
            f"parts, run.json: {self.status or 'none'}; window: {self.window or 'none'}"
        )


@dataclass
class Report:
    """num_looks: at the whole output. late: what came of requests that came late. findings: what must not be.

    verdict: None when the job did not come to its end.
    """

    number: int
    scenario: str
    num_rows: int = 0
    num_lives: int = 0
    num_looks: int = 0
    kills: list[Kill] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    verdict: Verdict | None = None
