"""Strict greedy verification: a drafted token is kept when it is the target's argmax.

The output is the text that plain greedy decoding gives (Blockwise Parallel Decoding, arXiv 1811.03115; trees
as in SpecInfer, arXiv 2305.09781). Equal logits are settled as `torch.argmax` settles them, by the lowest id.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import ClassVar

import torch
from torch import Tensor

from paceline.errors import UnsupportedFeatureError
from paceline.kernels.selection import argmax_rows
from paceline.sequence import Sequence, VerifyResult
from paceline.tree import DraftTree
from paceline.verifiers.base import tree_starts


class GreedyVerifier:
    """Follows the target's argmax through each tree."""

    lossless: ClassVar[bool] = True

    def check(self, sequence: Sequence) -> None:
        """Refuse temperatures above 0: a sampled request would silently become greedy."""
        if not sequence.parameters.is_greedy:
            raise UnsupportedFeatureError(
                f"verifier 'greedy' cannot serve temperature {sequence.parameters.temperature}: "
                "use temperature 0, or verifier 'sampling'"
            )

    def verify(
        self,
        trees: Seq[DraftTree],
        logits: Tensor,
        sequences: Seq[Sequence],  # noqa: ARG002
    ) -> list[VerifyResult]:
        """Keep, in each tree, the path along which every token is the argmax of its parent's row."""
        starts = tree_starts(trees, logits)
        chosen = argmax_rows(logits).cpu()  # [R], the one synchronisation
        return [_follow(tree, chosen[start : start + len(tree)]) for tree, start in zip(trees, starts)]

    def release(self, sequence: Sequence) -> None:
        """Nothing is remembered between rounds."""


def _follow(tree: DraftTree, chosen: Tensor) -> VerifyResult:
    """Path of `tree` along the tokens `chosen` [N + 1] after each node."""
    matches = tree.token_ids[1:] == chosen[tree.parents[1:]]
    path: list[int] = []
    node = 0
    # Parents come before children and siblings differ, so one pass over the matches meets the path in order.
    for candidate in (torch.nonzero(matches)[:, 0] + 1).tolist():
        if int(tree.parents[candidate]) == node:
            node = candidate
            path.append(candidate)
    return VerifyResult(tuple(path), tuple(tree.token_ids[path].tolist()), int(chosen[node]))
