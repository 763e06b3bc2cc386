"""Memory by the page: give pages back before the last reference is gone, take them only as they are used.

Weights read from safetensors are views of one mapping of the file, which stays as long as any of them does.
The pages of a single weight can be given back all the same.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence as Seq
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

_MADV_DONTNEED = 4
# Python names it since 3.13; the value is that of Linux on x86 and ARM.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def trim_heap() -> None:
    """Give freed memory back to the system; glibc keeps the gaps between live blocks otherwise."""
    if not sys.platform.startswith("linux"):
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def lazy_zeros(shape: Seq[int], dtype: torch.dtype) -> Tensor | None:
    """Zeros on the CPU that take memory page by page as they are written, however large the whole is.

    Returns:
        The tensor; None where the system has no such memory or refuses so much.
    """
    if not sys.platform.startswith("linux"):
        return None
    try:
        mapped = mmap.mmap(
            -1,
            max(prod(shape) * dtype.itemsize, 1),
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE,
        )
    except (OSError, OverflowError):
        return None
    with suppress(OSError):  # a kernel without huge pages does not know it
        # A huge page would be taken whole for the few bytes that one text writes to it.
        mapped.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(mapped, dtype=dtype, count=prod(shape)).view(*shape)


def drop_pages(tensor: Tensor) -> int:
    """Forget the content of a tensor that nobody reads any more; its pages leave this process.

    Args:
        tensor: contiguous, on the CPU. What it holds afterwards is undefined.

    Returns:
        Bytes given back: whole pages inside the tensor, on Linux; 0 elsewhere.
    """
    if not sys.platform.startswith("linux") or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return 0
    page = mmap.PAGESIZE
    start = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // page * page
    if end <= start:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), ctypes.c_int(_MADV_DONTNEED))
    return 0 if failed else end - start
