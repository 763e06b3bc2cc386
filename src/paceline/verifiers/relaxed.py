"""What the lossy verifiers share: greedy requests only, and results out of a rule over nodes.

A verifier of this family states for every node whether it may be kept (`judge`); the path is chosen by
`DraftForest.best_ends`. The target's argmax is always kept, and always follows the path.

The end of the text is left to the target: neither is a drafted end-of-sequence id kept that is not the
argmax, nor a drafted token where the argmax ends the text. Otherwise answers would grow or be cut short,
which no regret measures.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import UnsupportedFeatureError
from paceline.sequence import Refusal, Refused, RelaxedToken, Sequence, VerifyResult
from paceline.tree import DraftTree
from paceline.verifiers.base import tree_starts
from paceline.verifiers.draft_forest import DraftForest, Flags, Paths, Reals
from paceline.verifiers.node_regrets import NodeRegrets


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a rule says of R nodes that are not the target's choice (the others are kept anyway).

    Attributes:
        refusals: what may refuse a node, in the order in which it is asked: a name, and bool [R] that is true
            where it does.
        values: float64 [R], suffix values; None where the rule has none.
        worth: float64 [R], what the path down to a node is worth; None for its tokens.
    """

    refusals: tuple[tuple[Refused, Flags], ...]
    values: Reals | None = None
    worth: Reals | None = None


class RelaxedVerifier(ABC):
    """Keeps, in each tree, the path worth most of those that the rule of the subclass allows."""

    name: ClassVar[str]
    limits: ClassVar[tuple[str, ...]]
    """Fields of the request's `Relaxation` that the rule reads."""
    lossless: ClassVar[bool] = False

    def check(self, sequence: Sequence) -> None:
        """Refuse temperatures above 0: regret is measured against an argmax."""
        if not sequence.parameters.is_greedy:
            raise UnsupportedFeatureError(
                f"verifier {self.name!r} cannot serve temperature {sequence.parameters.temperature}: use "
                "temperature 0, or verifier 'sampling'"
            )

    @abstractmethod
    def judge(
        self,
        forest: DraftForest,
        scores: NodeRegrets,
        paths: Paths,
        logits: Tensor,
        sequences: Seq[Sequence],
    ) -> Judgement:
        """State which nodes are refused.

        Args:
            forest: all nodes.
            scores: their regrets.
            paths: what lies above them.
            logits: [R, V], processed.
            sequences: one per tree.
        """

    def verify(self, trees: Seq[DraftTree], logits: Tensor, sequences: Seq[Sequence]) -> list[VerifyResult]:
        """Keep the path of each tree that is worth most, then spends least regret, then comes first."""
        starts = tree_starts(trees, logits)
        if not trees:
            return []
        forest = DraftForest.of(trees, starts)
        scores = NodeRegrets.of(forest, logits, sequences)
        is_relaxed = ~scores.is_choice
        amounts = np.ones((3, len(forest)))
        amounts[:, forest.roots] = 0.0
        amounts[1] = np.where(is_relaxed, scores.regrets, 0.0)
        amounts[2] = is_relaxed
        # A banned token has no regret that could be added up; it is refused whatever stands above it.
        is_banned = ~np.isfinite(amounts[1])
        amounts[1, is_banned] = 0.0
        paths = Paths(*forest.path_sums(amounts))
        judged = self.judge(forest, scores, paths, logits, sequences)
        refusals = ((_END, scores.guards_end), (_BANNED, is_banned), *judged.refusals)
        is_refused = scores.guards_end | is_banned
        for _, refused in judged.refusals:
            is_refused |= refused
        ends = forest.best_ends(scores.is_choice | ~is_refused, paths, judged.worth)
        stopped_at = forest.least_regret_children(ends, scores.regrets)
        results = []
        for start, end, stopped in zip(starts, ends.tolist(), stopped_at.tolist(), strict=True):
            rows = forest.path(end)
            results.append(
                VerifyResult(
                    tuple(row - start for row in rows),
                    tuple(forest.token_ids[rows].tolist()),
                    int(scores.choices[end]),
                    _relaxed_tokens(rows, is_relaxed, scores.regrets),
                    _refusal(stopped, refusals, scores.regrets, judged.values),
                )
            )
        return results

    def release(self, sequence: Sequence) -> None:  # noqa: B027 - nothing to do for any of the family
        """Nothing is remembered here: the ledger is the sequence's own."""


_END: Refused = "end_of_text"
_BANNED: Refused = "banned"
_PRICE: Refused = "price"


def _relaxed_tokens(
    rows: list[int], is_relaxed: NDArray[np.bool_], regrets: Reals
) -> tuple[RelaxedToken, ...]:
    """The tokens of a path that are not the target's choice."""
    return tuple(
        RelaxedToken(place, float(regrets[row])) for place, row in enumerate(rows) if is_relaxed[row]
    )


def _refusal(row: int, refusals: Seq[tuple[Refused, Flags]], regrets: Reals, values: Reals | None) -> Refusal:
    """Why the path did not go on to `row`; -1 stands for no row."""
    if row < 0:
        return Refusal("leaf")
    # What nothing refuses was not worth its regret.
    reason = next((name for name, refused in refusals if refused[row]), _PRICE)
    return Refusal(reason, float(regrets[row]), np.nan if values is None else float(values[row]))
