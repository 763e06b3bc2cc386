"""The contract of a verifier: which drafted tokens of a tree are kept, and what follows them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import ClassVar, Protocol

from torch import Tensor

from paceline.errors import ShapeError
from paceline.sequence import Sequence, VerifyResult
from paceline.tree import DraftTree


class Verifier(Protocol):
    """Walks draft trees; one device synchronisation a round, whatever the batch.

    Attributes:
        lossless: whether the emitted tokens follow the target's own law exactly.
    """

    lossless: ClassVar[bool]

    def check(self, sequence: Sequence) -> None:
        """Raise UnsupportedFeatureError when the parameters ask for what this verifier cannot do."""

    def verify(self, trees: Seq[DraftTree], logits: Tensor, sequences: Seq[Sequence]) -> list[VerifyResult]:
        """Keep one path of each tree and add the target's own next token.

        Args:
            trees: one per sequence.
            logits: [sum of N_i + 1, V], processed logits of all tree nodes, trees in order. Not modified.
            sequences: whose trees they are.
        """

    def release(self, sequence: Sequence) -> None:
        """Forget whatever is remembered of a sequence; unknown sequences are fine."""


def tree_starts(trees: Seq[DraftTree], logits: Tensor) -> list[int]:
    """First row of each tree in `logits`; ShapeError unless the rows add up."""
    starts = [0]
    for tree in trees:
        starts.append(starts[-1] + len(tree))
    if logits.shape[0] != starts[-1]:
        raise ShapeError(f"{logits.shape[0]} rows of logits for {starts[-1]} tree nodes: give one row a node")
    return starts[:-1]
