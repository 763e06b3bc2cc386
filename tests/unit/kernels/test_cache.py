"""Compaction of an accepted path: the compiled move against torch's."""

from __future__ import annotations

import pytest
import torch

from paceline.kernels import build
from paceline.kernels.cache import compact_rows, copy_lane

PATHS = [[1, 2, 3], [3], [1, 4, 9], [2, 3, 4, 11], []]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("path", PATHS, ids=str)
def test_rows_of_the_path_end_up_behind_the_root(path, dtype, monkeypatch):
    """Nothing else moves: not other slots, and not what stands before the root or behind the path."""
    build.load_kernels()
    cache = torch.randn(6, 3, 2, 20, 16).to(dtype)  # [G, slots, H, S, D]
    expected = cache.clone()
    for place, node in enumerate(path):
        expected[:, 1, :, 6 + place] = cache[:, 1, :, 5 + node]
    in_torch = cache.clone()
    compact_rows(cache[:, 1], 5, path)
    assert torch.equal(cache, expected)
    monkeypatch.setattr(build, "_LOADED", {})
    compact_rows(in_torch[:, 1], 5, path)
    assert torch.equal(in_torch, expected)


def test_rows_that_are_not_contiguous_are_left_to_torch():
    build.load_kernels()
    cache = torch.randn(4, 1, 2, 16, 20).transpose(3, 4)
    expected = cache.clone()
    expected[:, 0, :, 6] = cache[:, 0, :, 8]
    compact_rows(cache[:, 0], 5, [3])
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_slot_is_copied_over_another_and_nothing_else(dtype):
    cache = torch.randn(6, 3, 2, 20, 16).to(dtype)  # [G, slots, H, S, D]
    expected = cache.clone()
    expected[:, 0, :, :7] = cache[:, 2, :, :7]
    copy_lane(cache[:, 2, :, :7], cache[:, 0, :, :7])
    assert torch.equal(cache, expected)
