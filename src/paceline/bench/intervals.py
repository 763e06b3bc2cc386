"""Intervals by paired bootstrap: prompts are drawn with replacement, the same draw for every arm.

Prompts differ far more among each other than arms differ on one prompt; drawing them together keeps that
out of a ratio between arms. All figures are ratios of sums (tokens over seconds, tokens over rounds), never
means of ratios: a short answer would count as much as a long one.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES = 2000
CONFIDENCE = 0.95
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and its 95 % interval."""

    value: float
    low: float
    high: float

    def as_dict(self) -> Mapping[str, float]:
        """`{value, low, high}`."""
        return {"value": self.value, "low": self.low, "high": self.high}


class Bootstrap:
    """Draws of groups, shared by all figures of a suite.

    Args:
        num_groups: units drawn with replacement (prompts, or batches of them).
        seed: of the draws.
        num_resamples: draws.
    """

    def __init__(self, num_groups: int, seed: int, num_resamples: int = NUM_RESAMPLES) -> None:
        generator = np.random.default_rng(seed)
        # [resamples, groups]: how often each group was drawn.
        self._counts: Floats = generator.multinomial(
            num_groups, np.full(num_groups, 1.0 / num_groups), size=num_resamples
        ).astype(np.float64)

    def ratio(self, amounts: Seq[float], of: Seq[float]) -> Interval | None:
        """Sum of `amounts` over sum of `of`; None when nothing was counted."""
        above, below = np.asarray(amounts, dtype=np.float64), np.asarray(of, dtype=np.float64)
        return self._interval(
            _divide(above.sum(), below.sum()), _divide(self._counts @ above, self._counts @ below)
        )

    def difference(
        self, amounts: Seq[float], of: Seq[float], base_amounts: Seq[float], base_of: Seq[float]
    ) -> Interval | None:
        """A ratio of sums of one arm minus that of another, on the same draws of prompts."""
        sums = [np.asarray(values, dtype=np.float64) for values in (amounts, of, base_amounts, base_of)]
        drawn = [self._counts @ values for values in sums]
        value = _divide(sums[0].sum(), sums[1].sum()) - _divide(sums[2].sum(), sums[3].sum())
        return self._interval(value, _divide(drawn[0], drawn[1]) - _divide(drawn[2], drawn[3]))

    def speed_up(
        self, tokens: Seq[float], seconds: Seq[float], base_tokens: Seq[float], base_seconds: Seq[float]
    ) -> Interval | None:
        """Tokens per second of one arm over those of another, on the same draws of prompts."""
        sums = [
            np.asarray(values, dtype=np.float64) for values in (tokens, seconds, base_tokens, base_seconds)
        ]
        drawn = [self._counts @ values for values in sums]
        value = _divide(_divide(sums[0].sum(), sums[1].sum()), _divide(sums[2].sum(), sums[3].sum()))
        return self._interval(value, _divide(_divide(drawn[0], drawn[1]), _divide(drawn[2], drawn[3])))

    def _interval(self, value: Floats, drawn: Floats) -> Interval | None:
        """The interval around `value`; draws in which nothing was counted are left out."""
        drawn = drawn[np.isfinite(drawn)]
        if not np.isfinite(value) or drawn.size == 0:
            return None
        tail = 100 * (1 - CONFIDENCE) / 2
        low, high = np.percentile(drawn, [tail, 100 - tail])
        return Interval(float(value), float(low), float(high))


def _divide(above: Floats, below: Floats) -> Floats:
    """Division in which x / 0 is not a number instead of a warning."""
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient: Floats = np.asarray(above / below, dtype=np.float64)
    return np.where(np.asarray(below) == 0, np.nan, quotient)
