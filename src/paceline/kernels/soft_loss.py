"""Cross-entropy of many long rows of bf16 logits, and its slope, in place; the kernel beside it says how."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from paceline.kernels import abi
from paceline.kernels.build import loaded_kernels


def is_available(products: Tensor, teacher: Tensor) -> bool:
    """Whether `soft_loss` takes these: bf16 on a CPU, rows one behind the other, kernels loaded."""
    return (
        loaded_kernels() is not None
        and products.device.type == "cpu"
        and products.dtype is teacher.dtype is torch.bfloat16
        and products.is_contiguous()
        and teacher.is_contiguous()
    )


def soft_loss(
    products: Tensor,
    teacher: Tensor,
    teacher_rows: Tensor,
    *,
    scale: float = 1.0,
    soft_cap: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Cross-entropy of each row with its teacher's; the products become its derivatives by them.

    Args:
        products: bf16 [N, S], of states and output layer; overwritten with the slopes.
        teacher: bf16 [T, S], logits.
        teacher_rows: int64 [N], in [0, T).
        scale: of the products.
        soft_cap: logits are `tanh(scale * product / soft_cap) * soft_cap`; None: `scale * product`.
        bias: fp32 [S], added to the products.

    Returns:
        fp32 [N].
    """
    library = loaded_kernels()
    assert library is not None, "ask is_available first"
    rows = teacher_rows.contiguous()
    losses = torch.empty(len(products))
    call = abi.SoftLoss(
        len(products), products.shape[1], torch.get_num_threads(), scale, soft_cap or 0.0,
        products.data_ptr(), teacher.data_ptr(), rows.data_ptr(),
        None if bias is None else bias.data_ptr(), losses.data_ptr(),
    )  # fmt: skip
    library.paceline_soft_loss(ctypes.byref(call))
    return losses
