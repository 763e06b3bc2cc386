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


HOLES = """
import os
import torch
from paceline.training.allocator import keep_large_blocks, release_free_pages

keep_large_blocks()

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

blocks = [torch.ones(2 << 20) for _ in range(40)]
kept = blocks[::8]
del blocks
before = resident()
release_free_pages()
print((before - resident()) // (1 << 20))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="tells glibc, which is Linux's")
def test_pages_between_blocks_go_back_when_that_is_asked_for():
    found = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    assert int(found.stdout) > 200, "of 320 MiB, 40 are still in use"
