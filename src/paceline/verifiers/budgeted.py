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

from paceline.kernels.verification import REASONS, Verdicts, can_verify, verify_budgeted
from paceline.sequence import Refusal, RelaxedToken, Sequence, VerifyResult
from paceline.tree import DraftTree
from paceline.verifiers.base import tree_starts
from paceline.verifiers.draft_forest import DraftForest, Paths, Reals
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

    def judge(
        self,
        forest: DraftForest,
        scores: NodeRegrets,
        paths: Paths,
        logits: Tensor,  # noqa: ARG002
        sequences: Seq[Sequence],
    ) -> Judgement:
        """Gate, ledger and cap of every node, and what each path is worth."""
        limits = _limits(sequences)[forest.owners]
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
        starts = tree_starts(trees, logits)
        eos = [() if own.parameters.ignore_eos else tuple(own.eos_token_ids) for own in sequences]
        found = verify_budgeted(trees, logits, _limits(sequences), eos)
        return [
            _result(tree, start, number, found) for number, (tree, start) in enumerate(zip(trees, starts))
        ]


def _limits(sequences: Seq[Sequence]) -> Reals:
    """float64 [B, 6]: horizon, scale of values, gate, regret left, cap and price of each request."""
    return np.array(
        [
            (
                own.value_horizon,
                own.value_horizon if own.is_value_normalised else 1,
                # No regret is below 0, so with a gate or a budget of nothing not even equal logits pass.
                own.max_regret_per_value or -1.0,
                own.allowance(len(sequence.output_ids)) - sequence.regret_spent + TOLERANCE
                if own.has_budget
                else -1.0,
                own.max_relaxed_tokens_per_block,
                own.regret_price,
            )
            for sequence in sequences
            for own in (sequence.parameters.relaxation,)
        ],
        dtype=np.float64,
    )


def _result(tree: DraftTree, start: int, number: int, found: Verdicts) -> VerifyResult:
    """What the kernel found for one tree."""
    end, stop = int(found.ends[number]), int(found.stops[number])
    parents, ids = tree.parents.numpy(), tree.token_ids.numpy()
    path: list[int] = []
    node = end - start
    while node:
        path.append(node)
        node = int(parents[node])
    path.reverse()
    token_ids: list[int] = ids[path].tolist() if path else []
    above = [start, *(start + node for node in path)]
    relaxed = tuple(
        RelaxedToken(place, float(found.regrets[start + node]))
        for place, (node, token_id) in enumerate(zip(path, token_ids, strict=True))
        if found.choices[above[place]] != token_id
    )
    refusal = Refusal("leaf")
    if stop >= 0:
        reason = REASONS[found.reasons[number]]
        refusal = Refusal(reason, float(found.regrets[stop]), float(found.values[number]))
    return VerifyResult(tuple(path), tuple(token_ids), int(found.choices[end]), relaxed, refusal)
