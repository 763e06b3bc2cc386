"""Paired bootstrap intervals."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.bench.intervals import Bootstrap


def test_a_ratio_is_one_of_sums_not_a_mean_of_ratios():
    interval = Bootstrap(2, seed=0).ratio([10, 1], [1, 1])
    assert interval.value == pytest.approx(5.5)
    interval = Bootstrap(2, seed=0).ratio([100, 1], [10, 1])
    assert interval.value == pytest.approx(101 / 11)


def test_the_same_seed_gives_the_same_interval_and_another_one_does_not():
    amounts, of = np.arange(1, 21), np.arange(1, 21)[::-1]
    assert Bootstrap(20, seed=3).ratio(amounts, of) == Bootstrap(20, seed=3).ratio(amounts, of)
    assert Bootstrap(20, seed=3).ratio(amounts, of) != Bootstrap(20, seed=4).ratio(amounts, of)


def test_a_constant_ratio_has_an_interval_without_width():
    interval = Bootstrap(5, seed=0).ratio([2, 4, 6, 8, 10], [1, 2, 3, 4, 5])
    assert (interval.low, interval.value, interval.high) == pytest.approx((2, 2, 2))


def test_pairing_takes_the_difference_between_prompts_out_of_a_speed_up():
    seconds = [1.0, 5.0, 2.0, 9.0, 4.0, 0.5]
    tokens = [10.0] * 6
    interval = Bootstrap(6, seed=0).speed_up(tokens, [s / 2 for s in seconds], tokens, seconds)
    assert (interval.low, interval.value, interval.high) == pytest.approx((2, 2, 2))
    # The speed itself varies between prompts, so its own interval is wide.
    speed = Bootstrap(6, seed=0).ratio(tokens, seconds)
    assert speed.high / speed.low > 1.5


def test_the_interval_covers_the_true_ratio_about_as_often_as_it_says():
    source = np.random.default_rng(1)
    covered = 0
    for trial in range(200):
        of = source.uniform(1, 3, 40)
        interval = Bootstrap(40, seed=trial, num_resamples=400).ratio(of * source.normal(2.0, 0.5, 40), of)
        covered += interval.low <= 2.0 <= interval.high
    assert 178 <= covered <= 199


def test_nothing_counted_has_no_figure():
    assert Bootstrap(3, seed=0).ratio([0, 0, 0], [0, 0, 0]) is None
    assert Bootstrap(1, seed=0).speed_up([1], [1], [0], [0]) is None


def test_draws_in_which_nothing_was_counted_are_left_out():
    interval = Bootstrap(2, seed=0).ratio([3, 0], [1, 0])
    assert (interval.low, interval.value, interval.high) == pytest.approx((3, 3, 3))
