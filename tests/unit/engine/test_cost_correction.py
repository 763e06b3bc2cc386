"""Costs follow what forwards take, in two factors."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.cost_correction import RANGE, CostCorrection, MeasuredCost

factors = st.floats(0.5, 3.5)


@settings(max_examples=40, deadline=None)
@given(factors, factors)
def test_factors_are_found_when_widths_differ(base, slope):
    correction = CostCorrection()
    for number in range(200):
        measured = MeasuredCost(0.02, 0.004 * (number % 5))
        correction.add(measured, base * measured.plain + slope * measured.extra)
    assert correction.base == pytest.approx(base, abs=0.05)
    assert correction.slope == pytest.approx(slope, abs=0.15)


def test_plain_rounds_say_nothing_of_further_rows():
    correction = CostCorrection()
    for _ in range(200):
        correction.add(MeasuredCost(0.02, 0.0), 0.06)
    assert correction.base == pytest.approx(3.0, rel=0.05)
    assert correction.slope == 1.0


def test_the_machine_may_become_quiet_again():
    correction = CostCorrection()
    for seconds in [0.06] * 100 + [0.02] * 100:
        correction.add(MeasuredCost(0.02, 0.0), seconds)
    assert correction.base == pytest.approx(1.0, rel=0.1)


def test_a_single_slow_round_is_believed_up_to_a_limit():
    careful, bold = CostCorrection(), CostCorrection()
    careful.add(MeasuredCost(0.02, 0.01), 1e6)
    bold.add(MeasuredCost(0.02, 0.01), RANGE * 0.03)
    assert (careful.base, careful.slope) == (bold.base, bold.slope)
    assert careful.base <= RANGE


def test_factors_stay_in_range():
    correction = CostCorrection()
    for number in range(100):
        correction.add(MeasuredCost(0.02, 0.01 * (number % 2)), 0.0)
    assert correction.base >= 1.0 / RANGE
    assert correction.slope >= 1.0 / RANGE
