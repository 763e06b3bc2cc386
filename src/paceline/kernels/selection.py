"""Choosing among logits on a CPU, with the compiled kernels where they are loaded."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import ShapeError
from paceline.kernels import abi
from paceline.kernels.build import loaded_kernels

DTYPES = {torch.float32: abi.FP32, torch.bfloat16: abi.BF16}
"""Logits that the kernels read."""
WORTH_COMPILED = 64
"""Entries of a row from which on a sum is worth a call of the kernel."""


def argmax_rows(logits: Tensor) -> Tensor:
    """Place of the largest logit of each row; equal ones are settled by the lowest id.

    torch's own argmax of bf16 takes longer than the output layer that made the logits.

    Args:
        logits: [M, V], any dtype and device.

    Returns:
        int64 [M] on the same device.
    """
    library = loaded_kernels()
    if logits.device.type != "cpu" or not logits.shape[1]:
        return logits.argmax(dim=-1)
    if library is None or logits.dtype not in DTYPES or not logits.is_contiguous():
        return logits.float().argmax(dim=-1)
    places = torch.empty(logits.shape[0], dtype=torch.int64)
    library.paceline_argmax(
        ctypes.c_void_p(logits.data_ptr()),
        ctypes.c_int32(DTYPES[logits.dtype]),
        ctypes.c_int64(logits.shape[0]),
        ctypes.c_int64(logits.shape[1]),
        ctypes.c_void_p(places.data_ptr()),
        ctypes.c_int32(torch.get_num_threads()),
    )
    return places


def log_sum_exp(logits: Tensor) -> Tensor:
    """Logarithm of the summed exponentials of each row: [M, k] -> fp32 [M]; minus infinity for no entries."""
    library = loaded_kernels() if logits.device.type == "cpu" else None
    is_learning = torch.is_grad_enabled() and logits.requires_grad
    can_compile = logits.dtype in DTYPES and logits.is_contiguous() and logits.shape[1] >= WORTH_COMPILED
    can_compile &= not is_learning
    if library is None or not can_compile:
        return torch.logsumexp(logits.float(), dim=-1)
    out = torch.empty(logits.shape[0])
    library.paceline_log_sum_exp(
        ctypes.c_void_p(logits.data_ptr()),
        ctypes.c_int32(DTYPES[logits.dtype]),
        ctypes.c_int64(logits.shape[0]),
        ctypes.c_int64(logits.shape[1]),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_int32(torch.get_num_threads()),
    )
    return out


def best_places(scores: Tensor, num_places: int) -> Tensor:
    """Places of the largest scores of each row, in no promised order.

    Args:
        scores: fp32 [M, k] without NaN on a CPU.
        num_places: n, at most k.

    Returns:
        int64 [M, n] on the same device.
    """
    if scores.device.type == "cpu" and loaded_kernels() is not None:
        return top_ids(scores, num_places)
    return scores.topk(num_places, dim=-1).indices


def logits_at(logits: Tensor, rows: NDArray[np.int64], ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Some logits of a CPU tensor, exactly.

    In numpy, because torch takes ten times as long to look up a few dozen numbers.

    Args:
        logits: [M, V] on the CPU, any floating dtype.
        rows: int64 [n].
        ids: int64 [..., n].

    Returns:
        float64 [..., n].
    """
    if logits.dtype is not torch.bfloat16:
        return logits.numpy()[rows, ids].astype(np.float64)
    # numpy has no bf16: its 16 bits are the upper half of an fp32 number.
    halves = logits.view(torch.int16).numpy()[rows, ids]
    return (halves.astype(np.int32) << 16).view(np.float32).astype(np.float64)


def top_ids(scores: Tensor, num_ids: int) -> Tensor:
    """Ids of the largest scores of each row, ascending; of equal ones at the edge the lowest ids.

    Ascending, because that is the order in which the rows of an output layer are best read.

    Args:
        scores: fp32 [M, V] without NaN.
        num_ids: k, at most V.

    Returns:
        int64 [M, k] on the same device.
    """
    num_rows, size = scores.shape
    if not 0 <= num_ids <= size:
        raise ShapeError(f"{num_ids} of {size} scores are asked for: at most all of them can be")
    if num_ids == size:
        return torch.arange(size, device=scores.device).expand(num_rows, size)
    library = loaded_kernels() if scores.device.type == "cpu" else None
    if library is None or scores.dtype is not torch.float32 or not num_ids:
        # A stable sort settles equal scores by the lowest id, which torch.topk does not promise.
        order = scores.float().sort(dim=-1, descending=True, stable=True).indices
        return order[:, :num_ids].sort(dim=-1).values
    scores = scores.contiguous()
    ids = torch.empty(num_rows, num_ids, dtype=torch.int64)
    library.paceline_top_ids(
        ctypes.c_void_p(scores.data_ptr()),
        ctypes.c_int64(num_rows),
        ctypes.c_int64(size),
        ctypes.c_int64(num_ids),
        ctypes.c_void_p(ids.data_ptr()),
        ctypes.c_int32(torch.get_num_threads()),
    )
    return ids
