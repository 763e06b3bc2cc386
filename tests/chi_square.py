"""The chi-square test, for tests of laws: draws are seeded, so an outcome never changes from run to run."""

from __future__ import annotations

import math

from torch import Tensor

# Normal quantile of 1 in 10,000: a correct law fails so rarely; the faults guarded here are off by thousands.
_QUANTILE = 3.719


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """Pearson's statistic of counts [k] against expected counts [k], all of them positive."""
    return float(((counts - expected) ** 2 / expected).sum())


def chi_square_limit(num_degrees: int) -> float:
    """What the statistic exceeds once in 10,000 times (Wilson and Hilferty's approximation)."""
    spread = 2 / (9 * num_degrees)
    return num_degrees * (1 - spread + _QUANTILE * math.sqrt(spread)) ** 3
