"""What one entry of `input.path` names, on a disk or in a bucket."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Place:
    """In a folder a file's name must say that it is input; a file named itself need not.

    Args:
        entry: as it is in `input.path`.
        root: the folder of a file, the folder itself, or the fixed part of a glob.
        named, found, ignored: paths of files named themselves, of those in folders, and of what is left out.
        versions: of objects, by path (see `InputFile`).
    """

    entry: str
    root: str
    named: list[str] = field(default_factory=list)
    found: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)


def is_hidden(name: str) -> bool:
    return name.startswith((".", "_"))


def match_parts(parts: list[str], pattern: list[str]) -> Iterator[str | int]:
    """How a glob takes a file below its root: "named", "found" in a folder that it names, or, where it is hidden, the number of parts after
    the one that is.
    """
    first, *rest = pattern
    part, *below = parts
    if first == "**" and rest:  # no folder at all, or any number of them
        yield from match_parts(parts, rest)
        rest = pattern
    if not fnmatch.fnmatchcase(part, first) or (rest and not below):
        return
    if is_hidden(part) and first[0] != part[0]:
        yield len(below)
    elif rest:
        yield from match_parts(below, rest)
    elif below:
        yield from look_below(below)
    else:
        yield "named"


def look_below(parts: list[str]) -> Iterator[str | int]:
    """As `match_parts`, of a file in a folder."""
    hidden = next((index for index, part in enumerate(parts) if is_hidden(part)), None)
    yield "found" if hidden is None else len(parts) - 1 - hidden
