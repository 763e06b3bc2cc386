"""Cross-entropy against the target's distribution through an output layer, without keeping its logits.

A draft head is trained on thousands of positions times several steps, and a row of logits is as long as the
vocabulary: kept for the backward pass they would take gigabytes. But the gradient of a cross-entropy is known
as soon as the logits are, so both are computed chunk by chunk and only the gradients of the states (and of
the output layer, where it learns) stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.kernels import soft_loss

CHUNK = 256
"""Positions whose logits exist at once."""


@dataclass(frozen=True, slots=True)
class Finish:
    """What stands between the product and the logits: `tanh(scale * product / cap) * cap`.

    Attributes:
        scale: factor.
        soft_cap: bound, or None.
    """

    scale: float = 1.0
    soft_cap: float | None = None

    def logits(self, products: Tensor) -> Tensor:
        """Products of states and rows -> logits."""
        logits = products * self.scale if self.scale != 1.0 else products
        return logits if self.soft_cap is None else torch.tanh(logits / self.soft_cap) * self.soft_cap

    def slope(self, logits: Tensor) -> Tensor | float:
        """Derivative of the logits by the products."""
        if self.soft_cap is None:
            return self.scale
        return self.scale * (1.0 - (logits / self.soft_cap).square())


class _SoftCrossEntropy(torch.autograd.Function):
    """See `soft_cross_entropy`."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher: Tensor,
        teacher_rows: Tensor,
        finish: Finish,
        dtype: torch.dtype,
    ) -> Tensor:
        wants_states, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        working = weight.to(dtype)
        total = torch.zeros((), dtype=torch.float32, device=states.device)
        states_grad = torch.zeros_like(states) if wants_states else None
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        bias_grad = torch.zeros_like(bias, dtype=torch.float32) if wants_bias and bias is not None else None
        for rows in torch.split(torch.arange(len(states), device=states.device), CHUNK):
            part = states[rows].to(dtype)
            found = _losses(part @ working.T, bias, teacher, teacher_rows[rows], finish)
            total += found.losses.sum()
            slope = found.slopes.to(dtype)
            if states_grad is not None:
                states_grad[rows] = (slope @ working).to(states.dtype)
            if weight_grad is not None:
                weight_grad += (slope.T @ part).float()
            if bias_grad is not None:
                bias_grad += found.slopes.float().sum(0)
        ctx.save_for_backward(states_grad, weight_grad, bias_grad)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        states_grad, weight_grad, bias_grad = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            None if states_grad is None else states_grad * grad,
            None if weight_grad is None else (weight_grad * grad).to(weight_dtype),
            None if bias_grad is None else (bias_grad * grad).to(bias_dtype),
            None,
            None,
            None,
            None,
        )


@dataclass(frozen=True, slots=True)
class _Losses:
    """Of some positions.

    Attributes:
        losses: fp32 [N].
        slopes: [N, S], derivatives by the products.
    """

    losses: Tensor
    slopes: Tensor


def _losses(
    products: Tensor, bias: Tensor | None, teacher: Tensor, teacher_rows: Tensor, finish: Finish
) -> _Losses:
    """Losses of a chunk, by the kernel where it can; the products may be overwritten."""
    if soft_loss.is_available(products, teacher):
        added = None if bias is None else bias.float().contiguous()
        losses = soft_loss.soft_loss(
            products, teacher, teacher_rows, scale=finish.scale, soft_cap=finish.soft_cap, bias=added
        )
        return _Losses(losses, products)
    products = products.float()
    logits = finish.logits(products if bias is None else products + bias.float())
    log_probs = torch.log_softmax(logits, dim=-1)
    wanted = torch.softmax(teacher[teacher_rows].float(), dim=-1)
    slopes = (log_probs.exp() - wanted) * finish.slope(logits)
    return _Losses(-(wanted * log_probs).sum(-1), slopes)


def soft_cross_entropy(
    states: Tensor,
    weight: Tensor,
    teacher: Tensor,
    teacher_rows: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    finish: Finish = Finish(),
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Sum over positions of the cross-entropy between the teacher's distribution and the states' own.

    Args:
        states: [N, D].
        weight: [S, D], rows of the output layer; learns when it wants a gradient.
        teacher: [T, S], the target's logits of the same entries.
        teacher_rows: int64 [N], row of the teacher for each state; None where N is T, in order.
        bias: [S].
        finish: between products and logits.
        dtype: of the products; by default that of the weights. Sums are fp32.

    Returns:
        fp32 scalar.
    """
    if teacher_rows is None:
        teacher_rows = torch.arange(len(teacher), device=teacher.device)
    if teacher.shape[1:] != weight.shape[:1] or teacher_rows.shape != states.shape[:1]:
        raise ShapeError(
            f"teacher is {tuple(teacher.shape)} with {len(teacher_rows)} rows asked for, for {len(states)} "
            f"states and {len(weight)} entries: give [T, S] and a row a state"
        )
    found: Tensor = _SoftCrossEntropy.apply(  # type: ignore[no-untyped-call]
        states, weight, bias, teacher, teacher_rows, finish, dtype or weight.dtype
    )
    return found
