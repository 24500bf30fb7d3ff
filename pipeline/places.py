"""What one entry of `input.path` names, on a disk or in a bucket."""

from __future__ import annotations

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
