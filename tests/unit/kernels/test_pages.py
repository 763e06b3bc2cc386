"""Pages of a dropped tensor leave the process; its neighbours keep theirs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from paceline.kernels.pages import drop_pages, lazy_zeros

SCRIPT = """
import psutil, sys, torch
from safetensors.torch import load_file, save_file
from paceline.kernels.pages import drop_pages

save_file({"a": torch.ones(16 << 20), "b": torch.full((16 << 20,), 2.0)}, sys.argv[1])
tensors = load_file(sys.argv[1])
rss = lambda: psutil.Process().memory_info().rss
total = sum(float(t.sum()) for t in tensors.values())
before = rss()
assert drop_pages(tensors["a"]) > 60 << 20
assert before - rss() > 60 << 20, (before, rss())
assert float(tensors["b"].sum()) == 2.0 * (16 << 20)
"""

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="madvise is Linux's")


@linux
def test_a_mapped_weight_leaves_while_its_file_stays_mapped(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "weights.safetensors")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


@linux
def test_neighbours_in_the_same_storage_keep_their_content():
    whole = torch.arange(3 * 5000, dtype=torch.float32)
    assert drop_pages(whole[5000:10_000]) > 0
    assert torch.equal(whole[:5000], torch.arange(5000.0))
    assert torch.equal(whole[10_000:], torch.arange(10_000.0, 15_000.0))


def test_small_and_strided_tensors_are_left_alone():
    assert drop_pages(torch.ones(4)) == 0
    assert drop_pages(torch.ones(4000, 4)[:, 1]) == 0


LAZY_SCRIPT = """
import psutil, torch
from paceline.kernels.pages import lazy_zeros

rss = lambda: psutil.Process().memory_info().rss
before = rss()
zeros = lazy_zeros((64, 1 << 30), torch.bfloat16)
zeros[:, :1000] = 1.0
assert rss() - before < 64 << 20, (before, rss())
assert float(zeros[63, :2000].float().sum()) == 1000.0
written = rss()
zeros[5, : 64 << 20] = 1.0
assert rss() - written > 120 << 20, "what is written takes memory"
written = rss()
del zeros
assert written - rss() > 120 << 20, "it leaves with the tensor"
"""


@linux
def test_lazy_zeros_take_memory_as_they_are_written():
    run = subprocess.run([sys.executable, "-c", LAZY_SCRIPT], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@linux
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lazy_zeros_are_zeros_of_that_shape(dtype):
    zeros = lazy_zeros((2, 3, 5), dtype)
    assert zeros.dtype == dtype
    assert torch.equal(zeros, torch.zeros(2, 3, 5, dtype=dtype))


@linux
def test_more_than_there_is_room_for_is_none():
    assert lazy_zeros((1 << 40, 1 << 30), torch.float32) is None
