"""How far forwards are from their measured cost, learned from the rounds themselves.

Costs are measured once, on a quiet machine. Later another process may share it, a processor clocks down, or
a batch holds texts of other lengths. Two factors cover that: one on what a plain step costs, one on what
further rows add to it. They are fitted by least squares over the newest rounds, older ones fading, and start
at 1 with the weight of a few rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

DECAY = 0.97
"""Of a round's weight, per further round."""
PRIOR = (0.2, 0.05)
"""Weight of the factors being 1, in squared shares of a plain step."""
RANGE = 4.0
"""Factor up to which costs, and single rounds, are believed to differ from what was measured."""


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """What a forward was measured to take, in seconds.

    Attributes:
        plain: of a plain step of all sequences.
        extra: what further rows add.
    """

    plain: float
    extra: float


class CostCorrection:
    """Two factors.

    Attributes:
        base: on the cost of a plain step.
        slope: on what further rows add.
    """

    def __init__(self) -> None:
        self.base = self.slope = 1.0
        # Sums over the rounds, of products of the two shares and the outcome: the normal equations.
        self._plain_plain = self._plain_extra = self._extra_extra = 0.0
        self._plain_outcome = self._extra_outcome = 0.0

    def add(self, measured: MeasuredCost, seconds: float) -> None:
        """Learn from one forward.

        Args:
            measured: what it should have taken.
            seconds: what it took.
        """
        extra = measured.extra / measured.plain
        outcome = min(max(seconds / measured.plain, (1.0 + extra) / RANGE), (1.0 + extra) * RANGE)
        self._plain_plain = DECAY * self._plain_plain + 1.0
        self._plain_extra = DECAY * self._plain_extra + extra
        self._extra_extra = DECAY * self._extra_extra + extra * extra
        self._plain_outcome = DECAY * self._plain_outcome + outcome
        self._extra_outcome = DECAY * self._extra_outcome + extra * outcome
        self._solve()

    def _solve(self) -> None:
        """Both factors; by hand, since a library's solver takes longer than all else that is chosen."""
        plain, slope = self._plain_plain + PRIOR[0], self._extra_extra + PRIOR[1]
        first, second = self._plain_outcome + PRIOR[0], self._extra_outcome + PRIOR[1]
        determinant = plain * slope - self._plain_extra * self._plain_extra
        base = (first * slope - second * self._plain_extra) / determinant
        factor = (second * plain - first * self._plain_extra) / determinant
        self.base = min(max(base, 1.0 / RANGE), RANGE)
        self.slope = min(max(factor, 1.0 / RANGE), RANGE)
