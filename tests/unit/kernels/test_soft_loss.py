"""The compiled cross-entropy against autograd in double precision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.kernels import build
from paceline.kernels.soft_loss import is_available, soft_loss


@pytest.fixture(scope="module", autouse=True)
def _kernels():
    build.load_kernels()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 70),
    st.integers(0, 2**31),
    st.sampled_from([0.01, 1.0, 30.0]),
    st.sampled_from([(1.0, None), (0.5, None), (2.0, 5.0)]),
    st.booleans(),
)
def test_losses_and_slopes_are_those_of_autograd(num_rows, size, seed, spread, finish, has_bias):
    scale, cap = finish
    generator = torch.Generator().manual_seed(seed)
    products = (torch.randn(num_rows, size, generator=generator) * spread).bfloat16()
    teacher = (torch.randn(num_rows + 2, size, generator=generator) * spread).bfloat16()
    rows = torch.randint(num_rows + 2, (num_rows,), generator=generator)
    bias = torch.randn(size, generator=generator) if has_bias else None
    exact = products.double().requires_grad_()
    logits = (exact if bias is None else exact + bias.double()) * scale
    logits = logits if cap is None else torch.tanh(logits / cap) * cap
    wanted = -(teacher[rows].double().softmax(-1) * logits.log_softmax(-1)).sum(-1)
    wanted.sum().backward()
    assert is_available(products, teacher)
    losses = soft_loss(products, teacher, rows, scale=scale, soft_cap=cap, bias=bias)
    torch.testing.assert_close(losses.double(), wanted.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(products.double(), exact.grad, rtol=0.01, atol=2e-4)


def test_rows_as_long_as_a_vocabulary_and_far_from_zero():
    generator = torch.Generator().manual_seed(1)
    products = (torch.randn(3, 49_155, generator=generator) * 4 + 90).bfloat16()
    teacher = (torch.randn(3, 49_155, generator=generator) * 4 - 90).bfloat16()
    wanted = -(teacher.double().softmax(-1) * products.double().log_softmax(-1)).sum(-1)
    losses = soft_loss(products.clone(), teacher, torch.arange(3))
    torch.testing.assert_close(losses.double(), wanted, rtol=1e-4, atol=1e-4)


def test_other_dtypes_and_views_are_left_to_torch():
    rows = torch.randn(4, 20).bfloat16()
    assert not is_available(rows.float(), rows)
    assert not is_available(rows[:, 1:], rows[:, 1:])
    assert is_available(rows, rows[1:])
