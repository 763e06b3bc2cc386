"""The frozen output layer that a draft head borrows from its target, whole or by rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from paceline.errors import ShapeError
from paceline.kernels.gather_dot import gather_dot


@dataclass(frozen=True, slots=True)
class OutputLayer:
    """Weight, bias, scale and soft-cap exactly as the target applies them.

    Attributes:
        weight: [V, D].
        bias: [V], or None.
        scale: factor of the logits.
        soft_cap: bound of the logits: `tanh(logits / soft_cap) * soft_cap`; None without.
        score_all: computes all logits, scale and soft-cap included, faster than from `weight`: [M, D] ->
            [M, V], such as a target's own packed layer.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    soft_cap: float | None = None
    score_all: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        """Refuse a bias of another size."""
        if self.weight.dim() != 2 or (self.bias is not None and self.bias.shape != self.weight.shape[:1]):
            raise ShapeError(
                f"output layer: weight is {tuple(self.weight.shape)} and bias "
                f"{None if self.bias is None else tuple(self.bias.shape)}: give [V, D] and [V]"
            )

    @property
    def num_entries(self) -> int:
        """Rows V."""
        return self.weight.shape[0]

    @property
    def scaled_bias(self) -> Tensor | None:
        """fp32 [V]: what the bias adds to the logits, a soft-cap aside; a ranking of them adds it too."""
        return None if self.bias is None else self.bias.detach().float() * self.scale

    def all_logits(self, hidden: Tensor) -> Tensor:
        """Logits of all entries: [M, D] -> fp32 [M, V]; with a gradient where `hidden` wants one."""
        if self.score_all is not None and not (torch.is_grad_enabled() and hidden.requires_grad):
            return self.score_all(hidden).float()
        bias = None if self.bias is None else self.bias.to(hidden.dtype)
        return self._finished(functional.linear(hidden, self.weight.to(hidden.dtype), bias).float())

    def logits_of(self, hidden: Tensor, entry_ids: Tensor) -> Tensor:
        """Exact logits of chosen entries, without a copy of their rows.

        Args:
            hidden: [M, D].
            entry_ids: int64 [M, k], or [k] for the same entries everywhere.

        Returns:
            fp32 [M, k].
        """
        return self._finished(gather_dot(hidden, self.weight, entry_ids, self.bias))

    def rows(self, entry_ids: Tensor) -> OutputLayer:
        """An output layer of some entries: int64 [S] -> a copy of S rows."""
        bias = None if self.bias is None else self.bias[entry_ids]
        return replace(self, weight=self.weight[entry_ids].contiguous(), bias=bias, score_all=None)

    def _finished(self, logits: Tensor) -> Tensor:
        """Scaled and capped."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits
