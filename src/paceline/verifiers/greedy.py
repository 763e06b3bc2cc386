"""Strict greedy verification: a drafted token is kept when it is the target's argmax.

The output is the text that plain greedy decoding gives (Blockwise Parallel Decoding, arXiv 1811.03115; trees
as in SpecInfer, arXiv 2305.09781). Equal logits are settled as `torch.argmax` settles them, by the lowest id.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import ClassVar

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
        chosen = argmax_rows(logits).tolist()  # [R], the one synchronisation
        return [_follow(tree, chosen[start : start + len(tree)]) for tree, start in zip(trees, starts)]

    def release(self, sequence: Sequence) -> None:
        """Nothing is remembered between rounds."""


def _follow(tree: DraftTree, chosen: list[int]) -> VerifyResult:
    """Path of `tree` along the tokens `chosen` [N + 1] after each node.

    Parents come before children and siblings differ, so one pass meets the path in order. It runs over lists:
    for a few dozen nodes that takes less than the first of the tensor operations that could replace it.
    """
    path: list[int] = []
    accepted: list[int] = []
    node = 0
    if len(chosen) > 1:
        edges = zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True)
        for candidate, (parent, token_id) in enumerate(edges):
            if parent == node and token_id == chosen[node]:
                node = candidate
                path.append(candidate)
                accepted.append(token_id)
    return VerifyResult(tuple(path), tuple(accepted), chosen[node])
