"""The cross-entropy that keeps no logits, against autograd on all of them."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import ShapeError
from paceline.kernels import build
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
    teacher, rows = torch.randn(N + 3, S) * 2, torch.randperm(N + 3)[:N]
    given = [x.clone().requires_grad_() if x is not None else None for x in (states, weight, bias)]
    own = [x.clone().requires_grad_() if x is not None else None for x in (states, weight, bias)]
    found = soft_cross_entropy(given[0], given[1], teacher, rows, bias=given[2], finish=finish) * 1.5
    products = own[0] @ own[1].T + (0 if own[2] is None else own[2])
    expected = -(teacher[rows].softmax(-1) * finish.logits(products).log_softmax(-1)).sum() * 1.5
    torch.testing.assert_close(found, expected)
    found.backward()
    expected.backward()
    for ours, theirs in zip(given, own, strict=True):
        if ours is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_a_frozen_output_layer_gets_no_gradient():
    states, weight = torch.randn(N, D, requires_grad=True), torch.randn(S, D)
    soft_cross_entropy(states, weight, torch.randn(N, S)).backward()
    assert states.grad is not None
    assert weight.grad is None


def test_bf16_weights_give_nearly_the_same():
    torch.manual_seed(0)
    states, weight = torch.randn(N, D), torch.randn(S, D)
    teacher = torch.randn(N, S)
    exact = float(soft_cross_entropy(states, weight, teacher))
    assert float(soft_cross_entropy(states, weight.bfloat16(), teacher)) == pytest.approx(exact, rel=0.02)
    narrowed = soft_cross_entropy(states, weight, teacher, dtype=torch.bfloat16)
    assert float(narrowed) == pytest.approx(exact, rel=0.02)


def test_no_positions_cost_nothing():
    states = torch.zeros(0, D, requires_grad=True)
    loss = soft_cross_entropy(states, torch.randn(S, D), torch.zeros(3, S), torch.zeros(0).long())
    loss.backward()
    assert float(loss.detach()) == 0


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ShapeError, match="teacher is"):
        soft_cross_entropy(torch.ones(2, D), torch.ones(S, D), torch.ones(2, S - 1))
    with pytest.raises(ShapeError, match="3 rows asked for, for 2 states"):
        soft_cross_entropy(torch.ones(2, D), torch.ones(S, D), torch.ones(3, S))


@pytest.mark.parametrize("finish", [Finish(), Finish(2.0, 3.0)])
def test_the_kernel_gives_the_gradients_of_torch(monkeypatch, finish):
    build.load_kernels()
    monkeypatch.setattr(module, "CHUNK", 4)
    torch.manual_seed(0)
    teacher, rows = (torch.randn(N + 3, S) * 2).bfloat16(), torch.randperm(N + 3)[:N]
    parts = [torch.randn(N, D), torch.randn(S, D), torch.randn(S)]
    found, losses = [], []
    for is_compiled in (True, False):
        with monkeypatch.context() as patch:
            if not is_compiled:
                patch.setattr(module.soft_loss, "is_available", lambda *_: False)
            own = [part.clone().requires_grad_() for part in parts]
            loss = soft_cross_entropy(
                own[0], own[1], teacher, rows, bias=own[2], finish=finish, dtype=torch.bfloat16
            )
            loss.backward()
        found.append([part.grad for part in own])
        losses.append(loss.detach())
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-3, atol=1e-3)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)
