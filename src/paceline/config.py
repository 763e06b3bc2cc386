"""Options shared by every layer: names of dtypes and devices, and friendly errors for unknown names."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import ConfigError

if TYPE_CHECKING:
    import torch

DEFAULT_NUM_SPECULATIVE_TOKENS = 16
"""Most drafted nodes a round: on CPUs a wider tree costs more than it brings (docs/benchmarks.md)."""

# Name -> torch's name: torch itself is imported when a dtype is asked for, not by whoever reads an option.
DTYPES: Mapping[str, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


AUTO_WIDTH = "auto"
"""Value of `num_speculative_tokens` that lets the node budget decide (`engine/node_budget.py`)."""

EXECUTIONS = ("auto", "eager", "fast")
"""How a target's forward is computed."""


def nearest_name(name: str, known: Iterable[str]) -> str:
    """The known name closest to `name` in spelling."""
    names = list(known)
    return (difflib.get_close_matches(name, names, n=1, cutoff=0.0) or names[:1] or [""])[0]


def read_width(value: int | str) -> int | str:
    """A value of `num_speculative_tokens`: a whole number of at least 0, or `auto`.

    Raises:
        ConfigError: it is neither.
    """
    if value == AUTO_WIDTH:
        return AUTO_WIDTH
    text = str(value).strip()
    if isinstance(value, bool) or not text.isdecimal():
        raise ConfigError(
            f"num_speculative_tokens is {value!r}: give a whole number of at least 0, or {AUTO_WIDTH!r}"
        )
    return int(text)


def check_known(kind: str, name: str, known: Iterable[str]) -> None:
    """Raise ConfigError naming the nearest known name unless `name` is known."""
    names = sorted(known)
    if name not in names:
        raise ConfigError(
            f"unknown {kind} {name!r}: did you mean {nearest_name(name, names)!r}? Known: {', '.join(names)}"
        )


def dtype_from_name(name: str) -> torch.dtype:
    """The torch dtype behind `fp32`, `bf16` or `fp16`."""
    import torch

    check_known("dtype", name, DTYPES)
    dtype: torch.dtype = getattr(torch, DTYPES[name])
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """`fp32`, `bf16` or `fp16`; other dtypes by torch's own name."""
    own_name = str(dtype).removeprefix("torch.")
    return next((name for name, known in DTYPES.items() if known == own_name), own_name)


def default_cache_dir() -> Path:
    """`$PACELINE_CACHE_DIR`, else the user's cache folder of the platform."""
    chosen = os.environ.get("PACELINE_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("paceline", appauthor=False))
