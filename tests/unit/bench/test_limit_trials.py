"""Limits tried by decoding: what is counted, and which trial is recommended."""

from __future__ import annotations

import math

import pytest

from conftest import PROMPTS
from paceline.bench.intervals import Interval
from paceline.bench.limit_trials import Trial, best_within, try_limits
from paceline.engine.generator import Generator
from paceline.relaxation import Relaxation
from paceline.testing import ReplayDrafter

NUM_NEW = 24
OPEN = Relaxation(
    risk_budget=math.inf,
    max_regret_per_value=math.inf,
    max_relaxed_tokens_per_block=9,
    value_horizon=99,
    regret_price=0.0,
)


@pytest.fixture
def generator(target_of, tokenizer, oracle_of) -> Generator:
    """The third drafted token of every round is wrong, so strict decoding keeps two a round."""
    recorded = {tuple(p): oracle_of("llama", tuple(p), NUM_NEW) for p in PROMPTS}
    drafter = ReplayDrafter(recorded, 6, wrong=2)
    return Generator(target_of("llama"), tokenizer, drafter, verifier="budgeted", num_speculative_tokens=8)


def test_strict_limits_change_nothing(generator):
    told = []
    trials = try_limits(
        generator, PROMPTS, [Relaxation(risk_budget=0.0)], max_new_tokens=NUM_NEW, on_answer=told.append
    )
    assert told == [1, 2, 3, 4, 5, 6]
    (trial,) = trials
    assert trial.regret_per_token == 0
    assert (trial.gain.value, trial.gain.low, trial.gain.high) == (1, 1, 1)
    assert (trial.log_prob_change.value, trial.log_prob_change.low) == (0, 0)


def test_what_is_relaxed_is_counted_and_costs_log_probability(generator):
    strict, free = try_limits(generator, PROMPTS, [Relaxation(risk_budget=0.0), OPEN], max_new_tokens=NUM_NEW)
    assert free.limits is OPEN
    assert free.regret_per_token > 0
    assert free.log_prob_change.value < 0
    assert not generator.engine.has_work
    assert free.accepted_per_round != strict.accepted_per_round


def _trial(price: float, accepted: float, low: float) -> Trial:
    change = Interval(low + 0.01, low, low + 0.02)
    return Trial(Relaxation(regret_price=price), accepted, None, 0.01, change)


def test_the_trial_that_accepts_most_within_the_loss_is_recommended():
    trials = [_trial(0, 3.0, -0.09), _trial(1, 2.6, -0.04), _trial(2, 2.4, -0.02)]
    assert best_within(trials, 0.05).limits.regret_price == 1
    assert best_within(trials, 0.03).limits.regret_price == 2
    assert best_within(trials, 0.01) is None
