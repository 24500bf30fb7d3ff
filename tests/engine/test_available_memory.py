"""Memory that a process can still take: the machine's, and what the control groups of a container leave of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.memory import available_bytes

MIB = 2**20
MEMINFO = "MemTotal:       16000000 kB\nMemFree:             240 kB\nMemAvailable:    1024000 kB\nHugePages_Total:       0\n"


def write(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n" if isinstance(content, int) else content)
    return root


V2 = {"proc/self/cgroup": "0::/kubepods/pod1/me\n"}
CASES = {
    "no groups: not what is free, but what can be had": ({}, 1000),
    "no limit": ({"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": 900 * MIB}, 1000),
    "a container's own group at the top": ({"sys/fs/cgroup/memory.max": 500 * MIB, "sys/fs/cgroup/memory.current": 200 * MIB}, 300),
    "files that can be dropped": (
        {
            "sys/fs/cgroup/memory.max": 500 * MIB,
            "sys/fs/cgroup/memory.current": 490 * MIB,
            "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {400 * MIB}\nactive_file 7\n",
        },
        410,
    ),
    "a limit of a group around": (
        {
            **V2,
            "sys/fs/cgroup/kubepods/pod1/me/memory.max": "max\n",
            "sys/fs/cgroup/kubepods/pod1/me/memory.current": 10 * MIB,
            "sys/fs/cgroup/kubepods/pod1/memory.max": 64 * MIB,
            "sys/fs/cgroup/kubepods/pod1/memory.current": 14 * MIB,
        },
        50,
    ),
    "version 1": (
        {
            "proc/self/cgroup": "5:cpu:/a\n4:memory:/docker/x\n",
            "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": 300 * MIB,
            "sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes": 250 * MIB,
            "sys/fs/cgroup/memory/docker/x/memory.stat": f"total_inactive_file {20 * MIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 2**63 - 4096,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": 900 * MIB,
        },
        70,
    ),
    "nothing left": ({"sys/fs/cgroup/memory.max": 5 * MIB, "sys/fs/cgroup/memory.current": 6 * MIB}, 0),
}


@pytest.mark.parametrize("files, mib", CASES.values(), ids=CASES)
def test_of_a_container(tmp_path, files, mib):
    assert available_bytes(write(tmp_path, {"proc/meminfo": MEMINFO, **files})) == mib * MIB


def test_where_the_system_does_not_say(tmp_path):
    """macOS."""
    assert available_bytes(tmp_path) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_of_this_machine():
    assert 2**20 < available_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
