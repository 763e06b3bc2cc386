"""Keep large buffers between the steps of a fit.

glibc gives every block of some megabytes its own mapping and hands it back when it is freed, so each step of
a fit with tens of thousands of phrases takes and zeroes a gigabyte of pages anew: half of its time. Told not
to, it keeps them.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NEVER = 2**31 - 1


def keep_large_blocks() -> bool:
    """Let freed blocks be used again by this process instead of returning them to the system.

    Returns:
        Whether the C library took the advice; where it is not glibc, nothing is changed.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, _NEVER))


def release_free_pages() -> None:
    """Give pages that no block uses back to the system, where the C library is glibc."""
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
