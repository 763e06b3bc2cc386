"""Every limit of lossy verification can be reached from the command line."""

from __future__ import annotations

from dataclasses import fields

import pytest

from paceline.cli.relaxation_options import RelaxationOptions
from paceline.errors import ConfigError, RequestError
from paceline.relaxation import Relaxation
from paceline.sampling import SamplingParameters


def test_without_options_the_limits_are_those_of_the_default_preset():
    assert RelaxationOptions().relaxation() == Relaxation()


def test_every_limit_can_be_reached():
    given = {
        "risk_budget": 1.0,
        "risk_budget_per_token": 0.5,
        "max_regret_per_value": 0.1,
        "max_relaxed_tokens_per_block": 3,
        "value_horizon": 4,
        "typical_epsilon": 0.2,
        "typical_delta": 0.1,
        "max_regret": 0.7,
    }
    limits = RelaxationOptions(preset="normalised", **given).relaxation()
    assert {name: getattr(limits, name) for name in given} == given
    # A preset decides whether values are normalised.
    assert {field.name for field in fields(Relaxation)} == {*given, "is_value_normalised"}
    assert limits.is_value_normalised


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"preset": "stabel"}, ConfigError, "stable"),
        ({"risk_budget": -1.0}, RequestError, "risk_budget is -1.0"),
    ],
)
def test_bad_limits_are_refused_before_anything_is_loaded(options, error, named):
    with pytest.raises(error, match=named):
        RelaxationOptions(**options).relaxation()


@pytest.mark.parametrize(
    ("verifier", "is_idle"), [(None, True), ("greedy", True), ("budgeted", False), ("margin", False)]
)
def test_says_when_the_limits_change_nothing(generator_of, capsys, verifier, is_idle):
    generator = generator_of("llama")
    generator.verifier = verifier
    asked = RelaxationOptions(risk_budget=2.0).applied(SamplingParameters(), generator)
    assert asked.relaxation.risk_budget == 2.0
    assert ("risk_budget changes nothing" in capsys.readouterr().err) == is_idle
    RelaxationOptions().applied(SamplingParameters(), generator)
    assert not capsys.readouterr().err
