"""What strict verification rejects, and by how much: the figures from which a regret budget is chosen.

Every round of strict decoding ends at a node that the target did not choose, or at a leaf. Over calibration
prompts (not those of a benchmark) this collects the regret of the best rejected node and its suffix value.
The gate of the budgeted verifier is then a percentile of regret over value, or the largest one whose expected
spending stays below a wanted increase of the negative log-likelihood per token: a relaxed token's regret is
exactly what its log-probability is below the argmax's.

Both are first-order: once a token is relaxed the text goes on differently, and the next rejections are
others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.engine.generator import Generator
from paceline.errors import ConfigError
from paceline.relaxation import Relaxation
from paceline.sampling import SamplingParameters

Reals = NDArray[np.float64]
BUDGETED = "budgeted"
REJECTED, BEYOND = "rejected", "beyond_horizon"


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Limits that fit the calibration prompts.

    Attributes:
        max_regret_per_value: the gate.
        risk_budget: regret that an average answer would spend under it; a fixed budget.
        risk_budget_per_token: the same per token, for a budget that grows with the answer.
        relaxed_share: rejected nodes that pass the gate.
    """

    max_regret_per_value: float
    risk_budget: float
    risk_budget_per_token: float
    relaxed_share: float


@dataclass(frozen=True)
class Calibration:
    """Rejections of strict decoding.

    Attributes:
        num_answers: answers given.
        num_tokens: their tokens.
        num_rounds: rounds in which something was drafted.
        reasons: how often a round ended for each reason: `rejected`, `beyond_horizon` (likewise, but too deep
            to have a suffix value), and those of `sequence.Refused`.
        regrets: float64 [n], regret of each rejected node, the least among its siblings.
        values: float64 [n], its suffix value.
    """

    num_answers: int
    num_tokens: int
    num_rounds: int
    reasons: dict[str, int]
    regrets: Reals
    values: Reals

    @property
    def ratios(self) -> Reals:
        """float64 [n]: regret over value."""
        return self.regrets / self.values

    def by_percentile(self, percentile: float) -> Suggestion:
        """The gate that this share of rejections with positive regret would pass.

        Args:
            percentile: above 0 and at most 100; interpolated linearly.
        """
        if not 0 < percentile <= 100:
            raise ConfigError(f"percentile is {percentile}: it must be above 0 and at most 100")
        positive = self.ratios[self.regrets > 0]
        if not positive.size:
            raise ConfigError("no rejected node has a regret above 0: give more prompts")
        return self._with_gate(float(np.percentile(positive, percentile)))

    def by_loss(self, loss_per_token: float) -> Suggestion:
        """The widest gate whose expected spending stays below a wanted loss of log-probability per token."""
        if not loss_per_token > 0:
            raise ConfigError(f"the loss per token is {loss_per_token}: it must be above 0")
        gates, group = np.unique(self.ratios, return_inverse=True)
        # A gate lets all rejections of one ratio through, or none of them.
        spent = np.cumsum(np.bincount(group, weights=self.regrets)) / max(self.num_tokens, 1)
        num_affordable = int(np.searchsorted(spent, loss_per_token, side="right"))
        return self._with_gate(float(gates[num_affordable - 1]) if num_affordable else 0.0)

    def _with_gate(self, gate: float) -> Suggestion:
        """What would be spent under a gate."""
        # A gate of 0 is strict decoding: not even equal logits pass.
        passes = (self.ratios <= gate) & (gate > 0)
        spent = float(self.regrets[passes].sum())
        return Suggestion(
            gate,
            spent / max(self.num_answers, 1),
            spent / max(self.num_tokens, 1),
            float(passes.mean()) if passes.size else 0.0,
        )


def calibrate(
    generator: Generator,
    prompts: Seq[Seq[int]],
    *,
    max_new_tokens: int,
    limits: Relaxation,
    on_answer: Callable[[int], None] = lambda _: None,
) -> Calibration:
    """Answer prompts strictly and collect what is rejected.

    Args:
        generator: with the drafter in question and verifier `budgeted`.
        prompts: token ids.
        max_new_tokens: most tokens of an answer.
        limits: `value_horizon` and `is_value_normalised` count; the budget is taken to be 0.
        on_answer: told the number of finished answers.

    Raises:
        ConfigError: the generator verifies otherwise, or nothing was rejected.
    """
    if generator.verifier != BUDGETED:
        raise ConfigError(f"verifier is {generator.verifier!r}: calibration reads what {BUDGETED!r} refuses")
    open_gate = {"max_regret_per_value": math.inf, "max_relaxed_tokens_per_block": 1 << 30}
    empty = {"risk_budget": 0.0, "risk_budget_per_token": 0.0}
    strict = SamplingParameters(
        max_new_tokens=max_new_tokens, relaxation=limits.updated({**open_gate, **empty})
    )
    reasons: dict[str, int] = {}
    found: list[tuple[float, float]] = []
    num_tokens = num_rounds = 0
    for number, prompt in enumerate(prompts, start=1):
        answer = generator.open(list(prompt), strict)
        while not answer.sequence.is_finished:
            for outcome in generator.engine.round():
                refusal = outcome.result.refusal
                # What a stop cuts off was not rejected, and without drafts nothing can be.
                if refusal is None or not outcome.tree.num_draft_tokens or answer.sequence.is_finished:
                    continue
                num_rounds += 1
                # With an open gate and an empty budget that is what a mere difference is refused by.
                is_rejection = refusal.reason == "budget"
                reason = REJECTED if is_rejection else BEYOND if refusal.reason == "gate" else refusal.reason
                reasons[reason] = reasons.get(reason, 0) + 1
                if is_rejection:
                    found.append((refusal.regret, refusal.value))
        num_tokens += len(answer.sequence.output_ids)
        on_answer(number)
    if not found:
        raise ConfigError("strict verification rejected nothing: give more prompts, or a drafter that drafts")
    regrets, values = np.array(found).T
    return Calibration(len(prompts), num_tokens, num_rounds, reasons, regrets, values)
