"""Budgeted verification: near-argmax tokens are kept within one regret budget for the whole request.

The rule is ASD's, "approximate speculative decoding" with a cumulative regret budget; lossy by design, and
its authors report a patent application. A drafted token that is not the argmax is kept when all this holds:

1. its regret per suffix value is at most `max_regret_per_value`;
2. the regret kept so far in this round and its own fit into what the request's budget has left;
3. the round has kept fewer than `max_relaxed_tokens_per_block` such tokens.

The first failure ends the path, and the target's own token follows. The published rule is for chains, where
the suffix value is the number of drafted tokens still at stake. On trees it is `value_horizon - depth + 1`
here: it depends on the request and on nothing that this machine could afford, so a useless deep leaf cannot
loosen the gate. Every path is scored under the same ledger; the one of most tokens, less `regret_price` for
every logit of regret, is kept and charged.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import ClassVar

import numpy as np
from torch import Tensor

from paceline.kernels.verification import BudgetedKernel, Limits, can_verify
from paceline.sequence import Sequence, VerifyResult
from paceline.tree import DraftTree
from paceline.verifiers.base import tree_starts
from paceline.verifiers.draft_forest import DraftForest, Paths
from paceline.verifiers.node_regrets import NodeRegrets
from paceline.verifiers.relaxed import Judgement, RelaxedVerifier

TOLERANCE = 1e-9
"""Slack of the ledger in logits, as published: sums of regrets round."""


class BudgetedVerifier(RelaxedVerifier):
    """Spends a bounded regret to keep the suffix that the target has scored already."""

    name: ClassVar[str] = "budgeted"
    limits: ClassVar[tuple[str, ...]] = (
        "risk_budget",
        "risk_budget_per_token",
        "max_regret_per_value",
        "max_relaxed_tokens_per_block",
        "value_horizon",
        "is_value_normalised",
        "regret_price",
    )

    def __init__(self) -> None:
        self._kernel = BudgetedKernel()

    def judge(
        self,
        forest: DraftForest,
        scores: NodeRegrets,
        paths: Paths,
        logits: Tensor,  # noqa: ARG002
        sequences: Seq[Sequence],
    ) -> Judgement:
        """Gate, ledger and cap of every node, and what each path is worth."""
        limits = np.array([_limits(sequence) for sequence in sequences], dtype=np.float64)[forest.owners]
        horizon, scale, gate, remaining, cap, price = limits.T
        values = np.maximum(horizon - paths.depths + 1, 0.0) / scale
        with np.errstate(divide="ignore", invalid="ignore"):
            passes_gate = (values > 0) & (scores.regrets / values <= gate)
        return Judgement(
            (
                ("gate", ~passes_gate),
                ("budget", paths.regrets > remaining),
                ("cap", paths.num_relaxed > cap),
            ),
            values,
            paths.depths - price * paths.regrets,
        )

    def verify(self, trees: Seq[DraftTree], logits: Tensor, sequences: Seq[Sequence]) -> list[VerifyResult]:
        """The path of each tree that is worth most; by the compiled kernel where it is loaded."""
        if not trees or not can_verify(logits):
            return super().verify(trees, logits, sequences)
        tree_starts(trees, logits)
        limits = [_limits(sequence) for sequence in sequences]
        eos = [_NOTHING if own.parameters.ignore_eos else own.eos_token_ids for own in sequences]
        return self._kernel.verify(trees, logits, limits, eos)


_NOTHING: frozenset[int] = frozenset()


def _limits(sequence: Sequence) -> Limits:
    """Horizon, scale of values, gate, regret left, cap and price of a request."""
    own = sequence.parameters.relaxation
    remaining = own.allowance(len(sequence.output_ids)) - sequence.regret_spent + TOLERANCE
    return (
        own.value_horizon,
        own.value_horizon if own.is_value_normalised else 1,
        # No regret is below 0, so with a gate or a budget of nothing not even equal logits pass.
        own.max_regret_per_value or -1.0,
        remaining if own.has_budget else -1.0,
        own.max_relaxed_tokens_per_block,
        own.regret_price,
    )
