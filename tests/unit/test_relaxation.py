"""Limits of lossy verification as a request states them."""

from __future__ import annotations

import pytest

from paceline.errors import ConfigError, RequestError
from paceline.relaxation import Relaxation


def test_presets_have_the_published_values():
    stable = Relaxation.preset("stable")
    assert (stable.risk_budget, stable.max_regret_per_value, stable.max_relaxed_tokens_per_block) == (
        8,
        0.25,
        2,
    )
    discovery = Relaxation.preset("discovery")
    assert (discovery.risk_budget, discovery.max_regret_per_value) == (12, 0.5)
    normalised = Relaxation.preset("normalised")
    assert normalised.is_value_normalised
    assert (normalised.risk_budget, normalised.max_regret_per_value) == (2.0625, 2.0625)
    assert (normalised.max_relaxed_tokens_per_block, normalised.value_horizon) == (1, 5)
    assert stable == Relaxation()


def test_an_unknown_preset_or_limit_names_the_nearest():
    with pytest.raises(ConfigError, match="stable"):
        Relaxation.preset("stabel")
    with pytest.raises(ConfigError, match="risk_budget"):
        Relaxation().updated({"risk_budgt": 1.0})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"risk_budget": -1.0}, "risk_budget is -1.0"),
        ({"risk_budget": float("nan")}, "risk_budget is nan"),
        ({"risk_budget": "8"}, "risk_budget is '8'"),
        ({"max_regret_per_value": -0.1}, "max_regret_per_value"),
        ({"max_relaxed_tokens_per_block": 1.5}, "max_relaxed_tokens_per_block is 1.5"),
        ({"value_horizon": 0}, "value_horizon is 0"),
        ({"value_horizon": 2.5}, "value_horizon is 2.5"),
        ({"is_value_normalised": 1}, "is_value_normalised is 1"),
        ({"typical_delta": True}, "typical_delta is True"),
        ({"risk_budget_per_token": float("inf")}, "risk_budget_per_token is inf"),
    ],
)
def test_values_out_of_range_are_refused_by_name(changes, named):
    with pytest.raises(RequestError, match=named):
        Relaxation().updated(changes)


@pytest.mark.parametrize(
    ("changes", "is_strict"),
    [
        ({}, False),
        ({"risk_budget": 0.0}, True),
        ({"max_regret_per_value": 0.0}, True),
        ({"max_relaxed_tokens_per_block": 0}, True),
        ({"risk_budget": 0.0, "risk_budget_per_token": 0.1}, False),
    ],
)
def test_no_budget_no_gate_or_no_tokens_is_strict(changes, is_strict):
    assert Relaxation().updated(changes).is_strict == is_strict


def test_the_allowance_grows_with_the_answer():
    limits = Relaxation(risk_budget=2.0, risk_budget_per_token=0.5)
    assert [limits.allowance(count) for count in (0, 1, 10)] == [2.0, 2.5, 7.0]
