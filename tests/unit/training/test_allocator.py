"""Freed blocks stay with the process, where the C library can be told so."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource
import torch
from paceline.training.allocator import keep_large_blocks

assert keep_large_blocks()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.zeros(16 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

# Blocks are split and joined a few times until they fit where the last ones lay.
for _ in range(4):
    faults()
print(faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="tells glibc, which is Linux's")
def test_pages_are_taken_from_the_system_once():
    """Five times 64 MB would be 80,000 pages; after a few rounds it takes next to none."""
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 2000
