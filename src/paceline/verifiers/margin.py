"""A control for budgeted verification: a fixed margin at every position, and no ledger.

A drafted token is kept when its regret is at most `max_regret`. Nothing bounds what a request loses.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import ClassVar

import numpy as np
from torch import Tensor

from paceline.sequence import Sequence
from paceline.verifiers.draft_forest import DraftForest, Paths
from paceline.verifiers.node_regrets import NodeRegrets
from paceline.verifiers.relaxed import Judgement, RelaxedVerifier


class MarginVerifier(RelaxedVerifier):
    """Keeps whatever is close to the argmax."""

    name: ClassVar[str] = "margin"
    limits: ClassVar[tuple[str, ...]] = ("max_regret",)

    def judge(
        self,
        forest: DraftForest,
        scores: NodeRegrets,
        paths: Paths,  # noqa: ARG002
        logits: Tensor,  # noqa: ARG002
        sequences: Seq[Sequence],
    ) -> Judgement:
        """Nodes whose regret is above the margin."""
        margins = np.array([s.parameters.relaxation.max_regret for s in sequences])
        # A margin of 0 is strict decoding, ties included.
        margins[margins == 0] = -1.0
        return Judgement((("threshold", ~(scores.regrets <= margins[forest.owners])),))
