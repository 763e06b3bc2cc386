"""Budgeted verification on a CPU by the compiled kernel: one call a round instead of a hundred small ones."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import UnsupportedFeatureError
from paceline.kernels import abi
from paceline.kernels.build import loaded_kernels
from paceline.kernels.selection import DTYPES, argmax_rows
from paceline.sequence import Refused
from paceline.tree import DraftTree

Whole = NDArray[np.int64]
Reals = NDArray[np.float64]
REASONS: tuple[Refused, ...] = ("price", "end_of_text", "banned", "gate", "budget", "cap")
"""What the kernel's numbers stand for."""


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What the kernel says of R nodes in B trees.

    Attributes:
        choices: int64 [R], the target's argmax after each node.
        regrets: float64 [R], 0 for the target's choices.
        ends: int64 [B], rows at which the paths end.
        stops: int64 [B], rows that they did not go on to; -1 behind a leaf.
        reasons: int32 [B], places in `REASONS` that say why not.
        values: float64 [B], suffix values of those rows; NaN behind a leaf.
    """

    choices: Whole
    regrets: Reals
    ends: Whole
    stops: Whole
    reasons: NDArray[np.int32]
    values: Reals


def can_verify(logits: Tensor) -> bool:
    """Whether the kernel is loaded and reads these logits."""
    return (
        logits.device.type == "cpu"
        and logits.dtype in DTYPES
        and logits.is_contiguous()
        and loaded_kernels() is not None
    )


def verify_budgeted(trees: Seq[DraftTree], logits: Tensor, limits: Reals, eos: Seq[Seq[int]]) -> Verdicts:
    """Choose the path of each tree by the budgeted rule.

    Args:
        trees: B.
        logits: [R, V], for which `can_verify` holds.
        limits: float64 [B, 6], contiguous: horizon, scale of values, gate, regret left, cap, price.
        eos: ids that may end the text of each tree's sequence.
    """
    library = loaded_kernels()
    if library is None:
        raise UnsupportedFeatureError("the kernels are not loaded: ask can_verify() first")
    num_trees, num_rows = len(trees), logits.shape[0]
    parents, tokens = _joined([tree.parents for tree in trees]), _joined([tree.token_ids for tree in trees])
    starts = np.array([0, *accumulate(len(tree) for tree in trees)], dtype=np.int64)
    eos_starts = np.array([0, *accumulate(len(ids) for ids in eos)], dtype=np.int64)
    eos_ids = np.array([token_id for ids in eos for token_id in ids], dtype=np.int64)
    choices = argmax_rows(logits).numpy()
    regrets, values = np.empty(num_rows), np.empty(num_trees)
    ends, stops = np.empty((2, num_trees), dtype=np.int64)
    reasons = np.empty(num_trees, dtype=np.int32)
    call = abi.BudgetedCall(
        num_trees, DTYPES[logits.dtype], logits.shape[1], logits.data_ptr(),
        *(
            array.ctypes.data
            for array in (
                starts, parents, tokens, choices, limits, eos_starts, eos_ids,
                regrets, ends, stops, reasons, values,
            )
        ),
    )  # fmt: skip
    library.paceline_verify_budgeted(ctypes.byref(call))
    return Verdicts(choices, regrets, ends, stops, reasons, values)


def _joined(parts: list[Tensor]) -> Whole:
    """One dense int64 array of all parts."""
    return np.ascontiguousarray((parts[0] if len(parts) == 1 else torch.cat(parts)).numpy(), dtype=np.int64)
