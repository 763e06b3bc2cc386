"""The compiled argmax against torch's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ShapeError
from paceline.kernels import build
from paceline.kernels.selection import argmax_rows, log_sum_exp, top_ids


@pytest.fixture(scope="module", autouse=True)
def _kernels():
    build.load_kernels()


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 70),
    st.integers(0, 2**31),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_places_are_those_of_torch(num_rows, size, seed, dtype):
    """Few distinct values, so that ties are common; both zeros, and infinities."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor([-torch.inf, -2.0, -0.0, 0.0, 1.5, 1.5])
    logits = values[torch.randint(6, (num_rows, size), generator=generator)].to(dtype)
    assert torch.equal(argmax_rows(logits), logits.float().argmax(-1))


def test_large_rows_and_views():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(9, 49_152, generator=generator).to(torch.bfloat16)
    assert torch.equal(argmax_rows(logits), logits.float().argmax(-1))
    assert torch.equal(argmax_rows(logits[:, 1:]), logits[:, 1:].float().argmax(-1))


def test_nothing_is_compiled_for_the_asking(monkeypatch):
    monkeypatch.setattr(build, "_LOADED", {})
    logits = torch.tensor([[0.0, 2.0, 2.0]], dtype=torch.bfloat16)
    assert argmax_rows(logits).tolist() == [1]
    assert not build._LOADED


@settings(max_examples=120, deadline=None)
@given(st.integers(1, 4), st.integers(1, 300), st.integers(0, 2**31), st.integers(1, 12), st.data())
def test_top_ids_are_the_largest_and_settle_ties_by_the_lowest(num_rows, size, seed, num_values, data):
    """Few distinct values, so that the edge runs through many equal ones."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(num_values, (num_rows, size), generator=generator).float()
    scores[scores == 3] = -torch.inf
    num_ids = data.draw(st.integers(0, size))
    found = top_ids(scores, num_ids)
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :num_ids]
    assert torch.equal(found, order.sort(dim=-1).values)


@pytest.mark.parametrize("order", ["random", "rising", "falling"])
def test_top_ids_of_a_vocabulary(order):
    scores = torch.randn(3, 50_000, generator=torch.Generator().manual_seed(0))
    if order != "random":
        scores = scores.sort(dim=-1, descending=order == "falling").values
    expected = scores.topk(2048).indices.sort(dim=-1).values
    assert torch.equal(top_ids(scores, 2048), expected)
    assert torch.equal(top_ids(scores.double(), 2048), expected)


def test_more_ids_than_scores_are_refused():
    with pytest.raises(ShapeError, match="4 of 3 scores"):
        top_ids(torch.ones(1, 3), 4)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(0, 300),
    st.integers(0, 2**31),
    st.sampled_from([0.1, 3.0, 60.0]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_masses_are_those_of_torch(num_rows, size, seed, spread, dtype):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(num_rows, size, generator=generator) * spread + spread).to(dtype)
    wanted = torch.logsumexp(logits.double(), -1)
    torch.testing.assert_close(log_sum_exp(logits).double(), wanted, rtol=1e-5, atol=1e-5)


def test_a_row_with_what_is_no_number_has_no_mass():
    logits = torch.randn(3, 200)
    logits[1, 77] = torch.nan
    logits[2, 198] = torch.nan
    assert log_sum_exp(logits).isnan().tolist() == [False, True, True]
    assert log_sum_exp(torch.full((1, 100), -torch.inf)).tolist() == [-torch.inf]
