"""Choosing among logits on a CPU, with the compiled kernels where they are loaded."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from paceline.kernels import abi
from paceline.kernels.build import loaded_kernels

_DTYPES = {torch.float32: abi.FP32, torch.bfloat16: abi.BF16}


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
    if library is None or logits.dtype not in _DTYPES or not logits.is_contiguous():
        return logits.float().argmax(dim=-1)
    places = torch.empty(logits.shape[0], dtype=torch.int64)
    library.paceline_argmax(
        ctypes.c_void_p(logits.data_ptr()),
        ctypes.c_int32(_DTYPES[logits.dtype]),
        ctypes.c_int64(logits.shape[0]),
        ctypes.c_int64(logits.shape[1]),
        ctypes.c_void_p(places.data_ptr()),
    )
    return places
