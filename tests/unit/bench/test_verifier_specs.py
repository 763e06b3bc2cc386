"""Verifiers by name and limits, as a benchmark is told them."""

from __future__ import annotations

import pytest

from paceline.bench.verifier_specs import VerifierSpec
from paceline.errors import ConfigError, RequestError
from paceline.relaxation import Relaxation


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("budgeted", {}),
        ("budgeted:stable", {}),
        (
            "budgeted:discovery",
            {"risk_budget": 12.0, "max_regret_per_value": 0.5, "regret_price": 1.0},
        ),
        ("budgeted:8/0.25/2/0/1.5", {"regret_price": 1.5}),
        ("budgeted:4", {"risk_budget": 4.0}),
        (
            "budgeted:4/0.1/3",
            {"risk_budget": 4.0, "max_regret_per_value": 0.1, "max_relaxed_tokens_per_block": 3},
        ),
        (
            "budgeted:0/1/2/0.05",
            {"risk_budget": 0.0, "max_regret_per_value": 1.0, "risk_budget_per_token": 0.05},
        ),
        ("typical:0.2/0.1", {"typical_epsilon": 0.2, "typical_delta": 0.1}),
        ("margin:0.25", {"max_regret": 0.25}),
    ],
)
def test_limits_stand_behind_a_colon(text, changes):
    spec = VerifierSpec.read(text)
    assert (spec.text, spec.name) == (text, text.partition(":")[0])
    assert spec.relaxation == Relaxation().updated(changes)
    assert spec.is_lossy


@pytest.mark.parametrize("name", ["greedy", "sampling"])
def test_lossless_verifiers_have_no_limits(name):
    assert not VerifierSpec.read(name).is_lossy
    with pytest.raises(ConfigError, match="has no limits"):
        VerifierSpec.read(f"{name}:1")


@pytest.mark.parametrize(
    ("text", "error", "named"),
    [
        ("budgetd", ConfigError, "did you mean 'budgeted'"),
        ("budgeted:stabel", ConfigError, "stable, discovery, normalised"),
        ("budgeted:1/2/3/4/5/6", ConfigError, "risk_budget/max_regret_per_value"),
        ("margin:", ConfigError, None),
        ("margin:-1", RequestError, "max_regret is -1.0"),
        ("budgeted:1/1/1.5", RequestError, "max_relaxed_tokens_per_block is 1.5"),
    ],
)
def test_bad_limits_are_refused(text, error, named):
    if named is None:
        assert VerifierSpec.read(text).relaxation == Relaxation()
        return
    with pytest.raises(error, match=named):
        VerifierSpec.read(text)
