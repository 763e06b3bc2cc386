"""The cross-entropy that keeps no logits, against autograd on all of them."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import ShapeError
from paceline.training import soft_cross_entropy as module
from paceline.training.soft_cross_entropy import Finish, soft_cross_entropy

N, D, S = 11, 6, 17


@pytest.mark.parametrize("finish", [Finish(), Finish(0.5), Finish(2.0, 3.0)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("chunk", [4, 256])
def test_value_and_gradients_are_those_of_autograd(monkeypatch, finish, has_bias, chunk):
    monkeypatch.setattr(module, "CHUNK", chunk)
    torch.manual_seed(0)
    states, weight = torch.randn(N, D), torch.randn(S, D)
    bias = torch.randn(S) if has_bias else None
    teacher, shares = torch.randn(N, S) * 2, torch.rand(N)
    shares[3] = 0
    given = [x.clone().requires_grad_() if x is not None else None for x in (states, weight, bias)]
    own = [x.clone().requires_grad_() if x is not None else None for x in (states, weight, bias)]
    found = soft_cross_entropy(given[0], given[1], teacher, shares, bias=given[2], finish=finish) * 1.5
    products = own[0] @ own[1].T + (0 if own[2] is None else own[2])
    expected = -(shares[:, None] * teacher.softmax(-1) * finish.logits(products).log_softmax(-1)).sum() * 1.5
    torch.testing.assert_close(found, expected)
    found.backward()
    expected.backward()
    for ours, theirs in zip(given, own, strict=True):
        if ours is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_a_frozen_output_layer_gets_no_gradient():
    states, weight = torch.randn(N, D, requires_grad=True), torch.randn(S, D)
    soft_cross_entropy(states, weight, torch.randn(N, S), torch.ones(N)).backward()
    assert states.grad is not None
    assert weight.grad is None


def test_bf16_weights_give_nearly_the_same():
    torch.manual_seed(0)
    states, weight = torch.randn(N, D), torch.randn(S, D)
    teacher, shares = torch.randn(N, S), torch.ones(N)
    exact = soft_cross_entropy(states, weight, teacher, shares)
    assert float(soft_cross_entropy(states, weight.bfloat16(), teacher, shares)) == pytest.approx(
        float(exact), rel=0.02
    )


def test_no_positions_cost_nothing():
    states = torch.zeros(0, D, requires_grad=True)
    loss = soft_cross_entropy(states, torch.randn(S, D), torch.zeros(0, S), torch.zeros(0))
    loss.backward()
    assert float(loss.detach()) == 0


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ShapeError, match="teacher is"):
        soft_cross_entropy(torch.ones(2, D), torch.ones(S, D), torch.ones(2, S - 1), torch.ones(2))
