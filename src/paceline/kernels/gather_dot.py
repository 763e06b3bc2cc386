"""Logits of some entries only: `out[m, j] = weight[index[m, j]] . hidden[m]`, without a copy of those rows.

What a speculated vocabulary costs beside its ranking ("SpecVocab", arXiv 2602.13836). Products are added in
fp32 and given in fp32, whatever the dtype of the weights. On a CPU the compiled kernel does it where it is
loaded, on CUDA the Triton kernel where Triton is installed; the reference does it everywhere.
"""

from __future__ import annotations

import ctypes
from importlib.util import find_spec

import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.kernels import abi
from paceline.kernels.build import loaded_kernels
from paceline.kernels.selection import DTYPES


def gather_dot(hidden: Tensor, weight: Tensor, index: Tensor, bias: Tensor | None = None) -> Tensor:
    """Scores of chosen rows of an output layer.

    Args:
        hidden: [M, D].
        weight: [V, D], fp32, bf16 or fp16.
        index: int64 [M, k], or [k] for the same rows everywhere, which reads each of them once.
        bias: [V], added to the scores.

    Returns:
        fp32 [M, k].

    Raises:
        ShapeError: shapes do not fit, or an id is not in [0, V). (On CUDA an id out of range is an assertion
            of the device, reported at the next synchronisation: asking here would wait for it.)
    """
    _check_shapes(hidden, weight, index, bias)
    if not index.numel():
        return hidden.new_zeros((hidden.shape[0], index.shape[-1]), dtype=torch.float32)
    if hidden.device.type == "cpu":
        library = loaded_kernels()
        if library is not None and weight.dtype in DTYPES and weight.stride(1) == 1:
            return _compiled(library, hidden, weight, index, bias)
        _check_ids(index, weight.shape[0])
    elif hidden.device.type == "cuda":
        torch._assert_async(((index >= 0) & (index < weight.shape[0])).all())
        if find_spec("triton") is not None:
            from paceline.kernels.gather_dot_triton import gather_dot_triton

            return gather_dot_triton(hidden, weight, index, bias)
    return gather_dot_reference(hidden, weight, index, bias)


def gather_dot_reference(hidden: Tensor, weight: Tensor, index: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same in plain torch, with a copy of the rows; see `gather_dot`."""
    rows = weight[index].float()  # [k, D] or [M, k, D]
    states = hidden.float()
    scores = states @ rows.T if index.dim() == 1 else torch.bmm(rows, states[:, :, None])[:, :, 0]
    return scores if bias is None else scores + bias[index].float()


def _compiled(
    library: ctypes.CDLL, hidden: Tensor, weight: Tensor, index: Tensor, bias: Tensor | None
) -> Tensor:
    """By the C++ kernel."""
    num_rows, num_ids = hidden.shape[0], index.shape[-1]
    states, index = hidden.float().contiguous(), index.contiguous()
    added = None if bias is None else bias.float().contiguous()
    scores = torch.empty(num_rows, num_ids)
    call = abi.GatherDot(
        DTYPES[weight.dtype], torch.get_num_threads(),
        num_rows, num_ids, weight.shape[1], weight.shape[0],
        weight.stride(0), 0 if index.dim() == 1 else num_ids,
        states.data_ptr(), weight.data_ptr(), index.data_ptr(),
        None if added is None else added.data_ptr(), scores.data_ptr(),
    )  # fmt: skip
    library.paceline_gather_dot.restype = ctypes.c_int64
    place = library.paceline_gather_dot(ctypes.byref(call))
    if place >= 0:
        raise _out_of_range(int(index.view(-1)[place]), weight.shape[0])
    return scores


def _check_shapes(hidden: Tensor, weight: Tensor, index: Tensor, bias: Tensor | None) -> None:
    """Refuse what does not fit together."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ShapeError(
            f"hidden is {tuple(hidden.shape)} and weight {tuple(weight.shape)}: give [M, D] and [V, D]"
        )
    if index.dtype != torch.int64 or index.shape[:-1] not in ((), hidden.shape[:1]) or not index.dim():
        raise ShapeError(
            f"index is {index.dtype} {tuple(index.shape)}: give int64 [{len(hidden)}, k], or [k] for all rows"
        )
    if len({tensor.device for tensor in (hidden, weight, index)}) > 1:
        raise ShapeError(
            f"hidden is on {hidden.device}, weight on {weight.device}, index on {index.device}: one is needed"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(f"bias is {tuple(bias.shape)}: give one number for each of {weight.shape[0]} rows")


def _check_ids(index: Tensor, num_weights: int) -> None:
    """Refuse ids that have no row."""
    bad = index[(index < 0) | (index >= num_weights)]
    if bad.numel():
        raise _out_of_range(int(bad[0]), num_weights)


def _out_of_range(token_id: int, num_weights: int) -> ShapeError:
    return ShapeError(f"index holds {token_id}: the output layer has rows 0 to {num_weights - 1}")
