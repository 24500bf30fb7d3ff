"""How much memory a process can still take, by the machine and by the control groups that it runs in."""

from __future__ import annotations

import os
from pathlib import Path

#: of a version of control groups: where its folders are, and the names of the limit, of what is used, and of what of that can be dropped
_CGROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes(root: Path = Path("/")) -> int:
    """Free memory and what the system would free (its file cache); all of the machine's where it does not say. root: for tests."""
    of_machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    kib = _read_table(root / "proc/meminfo").get("MemAvailable:")
    available = of_machine if kib is None else kib * 1024
    for folder in _cgroup_folders(root):
        for _, limit_name, used_name, cache_name in _CGROUPS:
            limit, used = _read_number(folder / limit_name), _read_number(folder / used_name)
            if limit is not None and used is not None:
                available = min(available, limit - used + _read_table(folder / "memory.stat").get(cache_name, 0))
    return max(available, 0)


def _cgroup_folders(root: Path) -> set[Path]:
    """Of the process's groups and of all groups around them. In a container its own group can be the top folder, whatever it is called."""
    tops = [root / top for top, *_ in _CGROUPS]
    folders = set(tops)
    for line in _read_lines(root / "proc/self/cgroup"):
        group = Path(line.split(":", 2)[-1].strip("/"))
        for top in tops:
            folders.update(top / part for part in (group, *group.parents))
    return folders


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _read_number(path: Path) -> int | None:
    """None where there is none: no such file, or the word "max"."""
    text = "".join(_read_lines(path)).strip()
    return int(text) if text.isdecimal() else None


def _read_table(path: Path) -> dict[str, int]:
    """Name and number of each line."""
    lines = [line.split() for line in _read_lines(path)]
    return {words[0]: int(words[1]) for words in lines if len(words) >= 2 and words[1].isdecimal()}
