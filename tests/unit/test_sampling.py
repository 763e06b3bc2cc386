"""Sampling parameters refuse what cannot be meant, with the field, the value and the range."""

from __future__ import annotations

import pytest

from paceline.errors import ConfigError, RequestError
from paceline.sampling import SamplingParameters


def test_defaults_are_greedy():
    assert SamplingParameters().is_greedy
    assert not SamplingParameters(temperature=0.1).is_greedy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("min_new_tokens", -1),
        ("temperature", -0.5),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 1e-50),
        ("stop", (3,)),
        ("bad_words", ("ab",)),
        ("bad_words", (7,)),
        ("logit_bias", {42: float("inf")}),
        ("logit_bias", {42: float("nan")}),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3.0),
        ("no_repeat_ngram_size", -1),
        ("logprobs", 21),
        ("stop", ("",)),
        ("bad_words", ((),)),
    ],
)
def test_value_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(RequestError, match=rf"{field} is .*: it must be"):
        SamplingParameters(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_new_tokens", None), ("top_p", 1.0), ("min_p", 1.0), ("logprobs", 0), ("logprobs", None)],
)
def test_ends_of_the_ranges_are_fine(field, value):
    assert getattr(SamplingParameters(**{field: value}), field) == value


def test_update_changes_a_copy():
    before = SamplingParameters(top_k=5)
    after = before.updated({"temperature": 0.7})
    assert (after.temperature, after.top_k, before.temperature) == (0.7, 5, 0.0)


def test_update_checks_ranges_too():
    with pytest.raises(RequestError, match="top_p is 2"):
        SamplingParameters().updated({"top_p": 2})


def test_unknown_parameter_names_the_nearest_one():
    with pytest.raises(ConfigError, match="'temprature': did you mean 'temperature'"):
        SamplingParameters().updated({"temprature": 1.0})


def test_one_stop_string_is_one_stop_string():
    """Not as many as it has letters."""
    assert SamplingParameters(stop="END").stop == ("END",)


def test_a_token_may_be_banned_by_its_bias():
    assert SamplingParameters(logit_bias={42: float("-inf")}).logit_bias[42] == float("-inf")


@pytest.mark.parametrize("relaxation", ["stable", {"risk_budget": 0}, None])
def test_limits_of_lossy_verifiers_have_to_be_a_relaxation(relaxation):
    with pytest.raises(RequestError, match=r"relaxation is .*a Relaxation"):
        SamplingParameters(relaxation=relaxation)
