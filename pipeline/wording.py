"""Numbers and texts as they are printed."""

from __future__ import annotations

import difflib
import os


def count(number: int, noun: str) -> str:
    """1 row, 2 rows."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def format_seconds(seconds: float) -> str:
    """1.5s, 2m05s, 3h07m."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes = int(seconds) // 60
    return f"{minutes}m{int(seconds) % 60:02}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02}m"


def clip(text: str, most: int = 240) -> str:
    """The beginning of a text, in one line that is safe to print."""
    shown = "".join(c if c.isprintable() else " " for c in text)  # control characters would act on the terminal
    shown = " ".join(shown.split())
    return shown if len(shown) <= most else shown[: most - 3] + "..."


def did_you_mean(path: str) -> str:
    """A hint with the nearest name beside a path that is not there; empty where there is none."""
    folder, name = os.path.split(path)
    try:
        near = difflib.get_close_matches(name, sorted(os.listdir(folder or ".")), n=1)
    except OSError:
        near = []
    return f"; did you mean '{os.path.join(folder, near[0])}'?" if near else ""
