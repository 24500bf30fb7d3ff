"""jobs/results/chaos: what came of all jobs of a mode (JSON), and every kill (a line of the log). A job is added when it is over."""

from __future__ import annotations

import json
import time
from collections import Counter

from jobs.chaos.report import Report
from jobs.evidence import RESULTS, write_result

FOLDER = "chaos"
_LISTS = ("lost", "doubled", "unequal", "foreign")


class Results:
    """Those of a mode so far. A mode that is run again is continued."""

    def __init__(self, mode: str):
        self.mode = mode
        self._folder = RESULTS / FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{mode}.json"
        self._jobs: list[dict] = json.loads(path.read_text())["jobs"] if path.exists() else []

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    @property
    def num_kills(self) -> int:
        return sum(sum(job["victims"].values()) for job in self._jobs)

    @property
    def share_in_writes(self) -> float:
        return _share(self._jobs)

    def add(self, report: Report, seed: int, seconds: float) -> None:
        verdict = report.verdict
        self._jobs.append(
            {
                "job": report.number,
                "seed": seed,
                "scenario": report.scenario,
                "rows": report.num_rows,
                "lives": report.num_lives,
                "looks": report.num_looks,
                "seconds": round(seconds),
                "victims": dict(Counter(f"{kill.signal} to {kill.victim}" for kill in report.kills)),
                "windows": dict(Counter(_kind(kill.window) for kill in report.kills if kill.window)),
                "late": report.late,
                "findings": report.findings,
                **{name: None if verdict is None else list(map(list, getattr(verdict, name))) for name in _LISTS},
            }
        )
        with open(self._folder / f"{self.mode}.log", "a", encoding="utf-8") as log:
            for line in describe(report):
                print(line, file=log)
        self._write()

    def _write(self) -> None:
        jobs = self._jobs
        total: dict[str, Counter] = {"victims": Counter(), "windows": Counter()}
        for job in jobs:
            for name, counts in total.items():
                counts.update(job[name])
        figures = {
            "mode": self.mode,
            "seeds": sorted({job["seed"] for job in jobs}),
            "num_jobs": len(jobs),
            "kills": self.num_kills,
            "kills_in_a_write": _num_in_writes(jobs),
            "share_in_a_write": round(self.share_in_writes, 3),
            "victims": dict(total["victims"].most_common()),
            "windows": dict(total["windows"].most_common()),
            "lives": sum(job["lives"] for job in jobs),
            "rows_compared": sum(job["rows"] for job in jobs if job["lost"] is not None),
            "looks_at_the_output": sum(job["looks"] for job in jobs),
            **{name: sum(len(job[name] or []) for job in jobs) for name in _LISTS},
            "jobs_given_up": sum(job["lost"] is None for job in jobs),
            "findings": sum(len(job["findings"]) for job in jobs),
        }
        write_result(f"{FOLDER}/{self.mode}", {**figures, "jobs": jobs})


def describe(report: Report) -> list[str]:
    """The job's lines of the log."""
    head = f"{time.strftime('%Y-%m-%dT%H:%M:%S')} job {report.number} ({report.scenario})"
    lines = [f"{head} kill {number}: {kill.describe(report.num_rows)}" for number, kill in enumerate(report.kills, 1)]
    lines += [f"{head} late: {text}" for text in report.late]
    lines += [f"{head} FINDING: {' '.join(text.split())}" for text in report.findings]
    verdict = report.verdict
    counts = "given up" if verdict is None else ", ".join(f"{len(getattr(verdict, name))} {name}" for name in _LISTS)
    return [*lines, f"{head} end: {report.num_rows} rows, {report.num_lives} lives, {report.num_looks} looks: {counts}"]


def _num_in_writes(jobs: list[dict]) -> int:
    return sum(
        times for job in jobs for window, times in job["windows"].items() if window.startswith(("part", "PUT", "run.json", "staging"))
    )


def _share(jobs: list[dict]) -> float:
    num_kills = sum(sum(job["victims"].values()) for job in jobs)
    return _num_in_writes(jobs) / num_kills if num_kills else 0.0


def _kind(window: str) -> str:
    """Without the numbers of bytes."""
    return " ".join("some" if word.isdigit() else word for word in window.split())
