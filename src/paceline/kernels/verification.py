"""Budgeted verification on a CPU by the compiled kernel: one call a round instead of a hundred small ones.

After a forward nothing of Python's is in the processor's caches, so whatever is done here is done slowly.
Buffers and structures are therefore kept from round to round, and the kernel writes the paths as they are
returned.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Seq
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from paceline.errors import UnsupportedFeatureError
from paceline.kernels import abi
from paceline.kernels.build import loaded_kernels
from paceline.kernels.selection import DTYPES
from paceline.sequence import Refusal, Refused, RelaxedToken, VerifyResult
from paceline.tree import DraftTree

REASONS: tuple[Refused, ...] = ("price", "end_of_text", "banned", "gate", "budget", "cap")
"""What the kernel's numbers stand for."""
Limits = tuple[float, float, float, float, float, float]
"""Horizon, scale of values, gate, regret left, cap and price."""


def can_verify(logits: Tensor) -> bool:
    """Whether the kernel is loaded and reads these logits."""
    return (
        logits.device.type == "cpu"
        and logits.dtype in DTYPES
        and logits.is_contiguous()
        and loaded_kernels() is not None
    )


class BudgetedKernel:
    """The kernel and its buffers; of one thread."""

    def __init__(self) -> None:
        self._call = abi.BudgetedCall()
        self._num_rows = self._num_trees = 0

    def verify(
        self,
        trees: Seq[DraftTree],
        logits: Tensor,
        limits: Seq[Limits],
        eos: Seq[frozenset[int]],
    ) -> list[VerifyResult]:
        """Choose the path of each tree by the budgeted rule.

        Args:
            trees: B.
            logits: [R, V], for which `can_verify` holds.
            limits: of each tree's request.
            eos: ids that may end the text of each tree's sequence.
        """
        library = loaded_kernels()
        if library is None:
            raise UnsupportedFeatureError("the kernels are not loaded: ask can_verify() first")
        self._reserve(len(trees), logits.shape[0])
        call, kept = self._call, []
        call.num_trees, call.dtype, call.size = len(trees), DTYPES[logits.dtype], logits.shape[1]
        call.num_threads, call.logits = torch.get_num_threads(), logits.data_ptr()
        for place, (tree, own, ids) in enumerate(zip(trees, limits, eos, strict=True)):
            parents, tokens, ends = _dense(tree.parents), _dense(tree.token_ids), _array(ids)
            kept.append((parents, tokens, ends))
            slot = self._trees[place]
            slot.parents, slot.tokens, slot.num_nodes = parents.data_ptr(), tokens.data_ptr(), len(tree)
            slot.eos, slot.num_eos = ends.ctypes.data, len(ends)
            slot.horizon, slot.scale, slot.gate, slot.remaining, slot.cap, slot.price = own
        library.paceline_verify_budgeted(ctypes.byref(call))
        results, start = [], 0
        for place in range(len(trees)):
            results.append(self._result(self._trees[place], start))
            start += self._trees[place].num_nodes
        return results

    def _result(self, slot: abi.TreeCall, start: int) -> VerifyResult:
        """What the kernel wrote about one tree."""
        end = start + slot.path_len
        path, token_ids = self._whole[1:3, start:end].tolist()
        relaxed: tuple[RelaxedToken, ...] = ()
        if slot.num_relaxed:
            last = start + slot.num_relaxed
            pairs = zip(self._whole[3, start:last].tolist(), self._regrets[start:last].tolist(), strict=True)
            relaxed = tuple(RelaxedToken(place, regret) for place, regret in pairs)
        refusal = _LEAF
        if slot.has_stop:
            refusal = Refusal(REASONS[slot.reason], slot.stop_regret, slot.stop_value)
        return VerifyResult(tuple(path), tuple(token_ids), slot.next_token, relaxed, refusal)

    def _reserve(self, num_trees: int, num_rows: int) -> None:
        """Room for so many trees and rows."""
        call = self._call
        if num_trees > self._num_trees:
            self._num_trees = num_trees
            self._trees = (abi.TreeCall * num_trees)()
            call.trees = self._trees
        if num_rows > self._num_rows:
            self._num_rows = num_rows
            # Choices, path, its tokens, and the places that are relaxed.
            self._whole, self._regrets = np.empty((4, num_rows), dtype=np.int64), np.empty(num_rows)
            rows = [self._whole[i].ctypes.data for i in range(4)]
            call.choices, call.path, call.path_tokens, call.places = rows
            call.regrets = self._regrets.ctypes.data


_LEAF = Refusal("leaf")


def _dense(ids: Tensor) -> Tensor:
    """int64, without gaps: itself as a rule."""
    return ids.to(torch.int64).contiguous()


@lru_cache(maxsize=256)
def _array(ids: frozenset[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Ids as the kernel reads them."""
    return np.array(sorted(ids), dtype=np.int64)
