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
        "regret_price": 1.5,
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
    ("verifier", "options", "told"),
    [
        (None, {"risk_budget": 2.0}, "risk_budget changes nothing with verifier 'greedy'"),
        ("greedy", {"preset": "stable"}, "preset changes nothing with verifier 'greedy'"),
        ("budgeted", {"risk_budget": 2.0, "preset": "discovery"}, ""),
        ("budgeted", {"max_regret": 2.0}, "max_regret changes nothing with verifier 'budgeted'"),
        ("margin", {"max_regret": 2.0}, ""),
        (
            "margin",
            {"max_regret": 2.0, "risk_budget": 1.0},
            "risk_budget changes nothing with verifier 'margin'",
        ),
        ("typical", {"preset": "discovery"}, "preset changes nothing with verifier 'typical'"),
        ("typical", {"typical_delta": 0.1}, ""),
    ],
)
def test_says_when_limits_change_nothing(generator_of, capsys, verifier, options, told):
    generator = generator_of("llama")
    generator.verifier = verifier
    given = RelaxationOptions(**options)
    assert given.applied(SamplingParameters(), generator).relaxation == given.relaxation()
    err = capsys.readouterr().err
    assert told in err
    assert bool(err) == bool(told)


def test_without_options_the_requests_own_limits_stay(generator_of, capsys):
    own = SamplingParameters(relaxation=Relaxation(risk_budget=3.0))
    assert RelaxationOptions().applied(own, generator_of("llama")) == own
    assert not capsys.readouterr().err
