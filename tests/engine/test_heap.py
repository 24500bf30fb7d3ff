"""Memory that was freed is there again without the system's help."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine.heap import keep_freed_memory

_PROGRAM = """
import resource
import torch
from engine.heap import keep_freed_memory

keep_freed_memory()

def run_pass():
    blocks = [torch.zeros(3_000_000) for _ in range(4)]

for _ in range(3):
    run_pass()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    run_pass()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_a_freed_block_is_used_again_without_page_faults():
    if not keep_freed_memory():
        pytest.skip("the C library is not glibc")
    num_faults = int(subprocess.run([sys.executable, "-c", _PROGRAM], check=True, capture_output=True, text=True).stdout)
    num_pages = 20 * 4 * 3_000_000 * 4 // 4096
    assert num_faults < num_pages / 100  # of glibc's own, nine in ten
