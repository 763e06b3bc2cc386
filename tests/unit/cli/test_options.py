"""From command line options to sampling parameters."""

from __future__ import annotations

import pytest

from paceline.cli.options import SamplingOptions
from paceline.errors import RequestError
from paceline.sampling import SamplingParameters


def test_options_that_are_not_given_keep_the_models_own_defaults(generator_of):
    own = SamplingParameters(temperature=0.7, top_k=50, repetition_penalty=1.1)
    generator = generator_of(default_parameters=own)
    assert SamplingOptions().parameters(generator) == own


def test_given_options_win_over_the_models_own_defaults(generator_of):
    generator = generator_of(default_parameters=SamplingParameters(temperature=0.7, top_k=50))
    parameters = SamplingOptions(temperature=0.0, max_new_tokens=9).parameters(generator)
    assert (parameters.temperature, parameters.max_new_tokens, parameters.top_k) == (0.0, 9, 50)


def test_every_sampling_parameter_can_be_reached(generator_of, tmp_path):
    pytest.importorskip("llguidance")
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    options = SamplingOptions(
        max_new_tokens=5,
        min_new_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        seed=4,
        stop=["a", "b"],
        include_stop_string=True,
        ignore_eos=True,
        eos_token_id=[7, 8],
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        no_repeat_ngram_size=3,
        logit_bias=["7=-1.5", "8=2"],
        bad_words=["an"],
        logprobs=2,
        json_schema=schema,
    )
    parameters = options.parameters(generator_of())
    assert all(
        getattr(parameters, name) != getattr(SamplingParameters(), name)
        for name in SamplingParameters.__slots__
        if name != "relaxation"  # has options of its own: test_relaxation_options.py
    )
    assert parameters.stop == ("a", "b")
    assert parameters.eos_token_ids == (7, 8)
    assert parameters.logit_bias == {7: -1.5, 8: 2.0}


@pytest.mark.parametrize("content", [None, "{", "[1]", '{"type": "objekt"}'])
def test_a_schema_that_cannot_be_used_is_found_out_before_the_model_is_loaded(tmp_path, content):
    pytest.importorskip("llguidance")
    file = tmp_path / "schema.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(RequestError, match="schema"):
        SamplingOptions(json_schema=file).check()


def test_bad_words_are_banned_at_the_start_and_after_a_space(generator_of, tokenizer):
    parameters = SamplingOptions(bad_words=["an"]).parameters(generator_of())
    assert [tokenizer.decode(list(ids)) for ids in parameters.bad_words] == ["an", " an"]


@pytest.mark.parametrize("text", ["7", "x=1", "7=much", "="])
def test_a_malformed_bias_says_how_to_write_it(generator_of, text):
    with pytest.raises(RequestError, match="ID=AMOUNT"):
        SamplingOptions(logit_bias=[text]).parameters(generator_of())


def test_values_out_of_range_are_refused_before_a_model_is_loaded():
    with pytest.raises(RequestError, match="top_p"):
        SamplingOptions(top_p=2.0).check()


def test_filters_without_a_temperature_are_noticed(generator_of, capsys):
    SamplingOptions(top_p=0.5).parameters(generator_of())
    assert "top_p" in capsys.readouterr().err
    SamplingOptions(top_p=0.5, temperature=0.9).parameters(generator_of())
    assert capsys.readouterr().err == ""
