"""Scores of chosen rows: the compiled and the Triton kernel against plain torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ShapeError
from paceline.kernels import build
from paceline.kernels import gather_dot as dispatch
from paceline.kernels.gather_dot import gather_dot, gather_dot_reference


@pytest.fixture(scope="module", autouse=True)
def _kernels():
    build.load_kernels()


def case(num_rows, num_weights, size, num_ids, seed, dtype, *, is_shared, has_bias):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_rows, size, generator=generator).to(dtype)
    weight = torch.randn(num_weights, size, generator=generator).to(dtype)
    shape = (num_ids,) if is_shared else (num_rows, num_ids)
    index = torch.randint(num_weights, shape, generator=generator)
    bias = torch.randn(num_weights, generator=generator) if has_bias else None
    return hidden, weight, index, bias


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 40),
    st.integers(1, 200),
    st.integers(0, 90),
    st.integers(0, 2**31),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.booleans(),
    st.booleans(),
)
def test_scores_are_those_of_the_reference(rows, weights, size, ids, seed, dtype, is_shared, has_bias):
    given_ = case(rows, weights, size, ids, seed, dtype, is_shared=is_shared, has_bias=has_bias)
    found = gather_dot(*given_)
    assert (found.shape, found.dtype) == ((rows, ids), torch.float32)
    torch.testing.assert_close(found, gather_dot_reference(*given_), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_shared", [False, True], ids=["own ids", "shared ids"])
def test_many_ids_are_shared_among_threads(dtype, is_shared):
    given_ = case(10, 5000, 640, 2048, 1, dtype, is_shared=is_shared, has_bias=False)
    torch.testing.assert_close(gather_dot(*given_), gather_dot_reference(*given_), rtol=1e-4, atol=1e-3)


def test_weights_may_be_a_view_of_rows():
    hidden, weight, index, _ = case(2, 30, 48, 7, 0, torch.bfloat16, is_shared=False, has_bias=False)
    wide = torch.cat([weight, weight], dim=1)
    assert torch.equal(gather_dot(hidden, wide[:, :48], index), gather_dot(hidden, weight, index))


def test_rows_do_not_depend_on_their_company():
    """A token's bits are the same in a wide beam as alone, and with shared ids as with its own."""
    hidden, weight, index, _ = case(4, 300, 100, 50, 3, torch.bfloat16, is_shared=True, has_bias=False)
    together = gather_dot(hidden, weight, index)
    for row in range(4):
        assert torch.equal(gather_dot(hidden[row : row + 1], weight, index)[0], together[row])
    assert torch.equal(gather_dot(hidden, weight, index.expand(4, 50)), together)


@pytest.mark.parametrize("bad", [-1, 30, 2**40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["compiled", "reference"])
def test_ids_out_of_range_are_refused(bad, dtype):
    hidden, weight, index, _ = case(3, 30, 16, 600, 0, dtype, is_shared=False, has_bias=False)
    index[2, 5] = bad
    with pytest.raises(ShapeError, match=f"index holds {bad}: the output layer has rows 0 to 29"):
        gather_dot(hidden, weight, index)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden": torch.ones(3, 7)}, r"hidden is \(3, 7\)"),
        ({"index": torch.zeros(2, 5, dtype=torch.int64)}, r"int64 \[3, k\]"),
        ({"index": torch.zeros(3, 5, dtype=torch.int32)}, "index is torch.int32"),
        ({"bias": torch.zeros(29)}, r"bias is \(29,\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, named):
    hidden, weight, index, bias = case(3, 30, 16, 5, 0, torch.float32, is_shared=False, has_bias=True)
    asked = {"hidden": hidden, "weight": weight, "index": index, "bias": bias} | change
    with pytest.raises(ShapeError, match=named):
        gather_dot(**asked)


def test_nothing_is_compiled_for_the_asking(monkeypatch):
    monkeypatch.setattr(build, "_LOADED", {})
    given_ = case(3, 30, 16, 5, 0, torch.bfloat16, is_shared=False, has_bias=True)
    monkeypatch.setattr(dispatch, "_compiled", None)
    torch.testing.assert_close(gather_dot(*given_), gather_dot_reference(*given_))
    assert not build._LOADED


_INTERPRETED = """
import torch
from paceline.kernels.gather_dot import gather_dot_reference
from paceline.kernels.gather_dot_triton import gather_dot_triton
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    for rows, size, ids, is_shared, has_bias in (
        (1, 64, 16, False, False),
        (3, 100, 37, False, True),
        (2, 129, 1, True, True),
        (4, 640, 70, True, False),
    ):
        torch.manual_seed(0)
        hidden, weight = torch.randn(rows, size).to(dtype), torch.randn(90, size).to(dtype)
        index = torch.randint(90, (ids,) if is_shared else (rows, ids))
        bias = torch.randn(90) if has_bias else None
        found = gather_dot_triton(hidden, weight, index, bias)
        expected = gather_dot_reference(hidden, weight, index, bias)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
"""


def test_the_triton_kernel_in_its_interpreter():
    """In a process of its own: Triton decides at import whether it interprets."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    folder = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", _INTERPRETED], check=True, env=environment, cwd=folder, timeout=240)
