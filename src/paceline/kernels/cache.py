"""Moving rows of the key-value cache on a CPU, with the compiled kernels where they are loaded."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.build import loaded_kernels
from paceline.transfers import upload

_WHOLE_NUMBERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def copy_lane(source: Tensor, target: Tensor) -> None:
    """Copy one slot of a cache over another: [G, H, S, D] each, of one dtype, not overlapping.

    On a CPU in numpy, with one thread: torch's would go on spinning while the next forward wants the cores.
    """
    if source.device.type != "cpu":
        target.copy_(source)
        return
    # numpy knows no bf16, and bits are bits.
    kind = _WHOLE_NUMBERS[source.element_size()]
    np.copyto(target.view(kind).numpy(), source.view(kind).numpy())


def compact_rows(lane: Tensor, start: int, path: Seq[int]) -> None:
    """Move rows `start + path[i]` to `start + 1 + i`, in place.

    In torch this takes a copy of the rows, and torch's own threads, which go on spinning while the next
    forward wants the cores.

    Args:
        lane: [G, H, S, D], one slot of a cache; rows of D are contiguous.
        start: row of a tree's root.
        path: nodes of the tree, ascending, parents first.
    """
    if list(path) == list(range(1, len(path) + 1)):
        return
    library = loaded_kernels() if lane.device.type == "cpu" else None
    if library is None or lane.stride(3) != 1 or lane.stride(2) != lane.shape[3]:
        source = upload(torch.tensor(path) + start, lane.device)
        lane[:, :, start + 1 : start + 1 + len(path)] = lane.index_select(2, source)
        return
    size, nodes = lane.element_size(), array("q", path)
    library.paceline_compact(
        ctypes.c_void_p(lane.data_ptr() + start * lane.stride(2) * size),
        ctypes.c_int64(lane.shape[0]),
        ctypes.c_int64(lane.stride(0) * size),
        ctypes.c_int64(lane.shape[1]),
        ctypes.c_int64(lane.stride(1) * size),
        ctypes.c_int64(lane.shape[3] * size),
        ctypes.c_void_p(nodes.buffer_info()[0]),
        ctypes.c_int64(len(path)),
    )
