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
        shares: Tensor,
        finish: Finish,
    ) -> Tensor:
        wants_states, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        total = torch.zeros((), dtype=torch.float32, device=states.device)
        states_grad = torch.zeros_like(states) if wants_states else None
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        bias_grad = torch.zeros_like(bias, dtype=torch.float32) if wants_bias and bias is not None else None
        for rows in torch.split(torch.arange(len(states), device=states.device), CHUNK):
            part = states[rows].to(weight.dtype)
            products = (part @ weight.T).float()
            if bias is not None:
                products += bias.float()
            logits = finish.logits(products)
            log_probs = torch.log_softmax(logits, dim=-1)
            wanted = torch.softmax(teacher[rows].float(), dim=-1)
            share = shares[rows, None].float()
            total -= (share * wanted * log_probs).sum()
            slope = (log_probs.exp() - wanted) * share * finish.slope(logits)
            if states_grad is not None:
                states_grad[rows] = (slope.to(weight.dtype) @ weight).to(states.dtype)
            if weight_grad is not None:
                weight_grad += (slope.to(weight.dtype).T @ part).float()
            if bias_grad is not None:
                bias_grad += slope.sum(0)
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
        )


def soft_cross_entropy(
    states: Tensor,
    weight: Tensor,
    teacher: Tensor,
    shares: Tensor,
    *,
    bias: Tensor | None = None,
    finish: Finish = Finish(),
) -> Tensor:
    """Sum over positions of share times cross-entropy between the teacher's distribution and the states' own.

    Args:
        states: [N, D].
        weight: [S, D], rows of the output layer; learns when it wants a gradient.
        teacher: [N, S], the target's logits of the same entries.
        shares: [N], what each position counts.
        bias: [S].
        finish: between products and logits.

    Returns:
        fp32 scalar.
    """
    if teacher.shape != (len(states), len(weight)) or shares.shape != states.shape[:1]:
        raise ShapeError(
            f"teacher is {tuple(teacher.shape)} and shares {tuple(shares.shape)} for {len(states)} states "
            f"and {len(weight)} entries: give [N, S] and [N]"
        )
    found: Tensor = _SoftCrossEntropy.apply(states, weight, bias, teacher, shares, finish)  # type: ignore[no-untyped-call]
    return found
