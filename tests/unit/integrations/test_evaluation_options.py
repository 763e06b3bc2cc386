"""`generation_kwargs` of evaluation tasks as SamplingParameters."""

from __future__ import annotations

import pytest
import transformers

from paceline.drafters.none import NoDrafter
from paceline.engine.generator import Generator
from paceline.engine.model_defaults import default_parameters
from paceline.errors import PacelineError, RequestError, UnsupportedFeatureError
from paceline.integrations.evaluation_options import cut_answer, read_generation_kwargs
from paceline.integrations.speed_record import SpeedRecord
from paceline.targets.huggingface import HuggingFaceTarget
from paceline.testing import tiny_model


@pytest.fixture(scope="module")
def make(tokenizer):
    """Generator of a model whose `generation_config` says this."""
    target = HuggingFaceTarget(tiny_model("llama"), check=False)

    def make(**settings):
        target.model.generation_config = transformers.GenerationConfig(**settings)
        return Generator(target, tokenizer, NoDrafter(), default_parameters=default_parameters(target.model))

    return make


def test_nothing_said_is_greedy_for_256_tokens(make):
    asked = read_generation_kwargs(make(), {})
    assert asked.parameters.is_greedy
    assert asked.max_new_tokens == asked.parameters.max_new_tokens == 256
    assert asked.until == ()


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"until": "\n"}, {"stop": ("\n",)}),
        ({"until": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"max_gen_toks": 9, "max_tokens": 3}, {"max_new_tokens": 9}),
        ({"max_new_tokens": 9}, {"max_new_tokens": 9}),
        ({"max_completion_tokens": 9}, {"max_new_tokens": 9}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({"do_sample": True, "temperature": 0.7, "top_p": 0.9}, {"temperature": 0.7, "top_p": 0.9}),
        ({"repetition_penalty": 1.2, "no_repeat_ngram_size": 3}, {"repetition_penalty": 1.2}),
        ({"num_beams": 1, "use_cache": True}, {"temperature": 0.0}),
    ],
    ids=str,
)
def test_options_are_honoured(make, kwargs, expected):
    given = dict(kwargs)
    parameters = read_generation_kwargs(make(), kwargs).parameters
    assert {name: getattr(parameters, name) for name in expected} == expected
    assert kwargs == given


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"num_beams": 4}, "num_beams=4"),
        ({"max_length": 64}, "give max_gen_toks"),
        ({"seed": 1}, "--seed"),
        ({"stop": ["a"]}, "give until"),
        ({"temprature": 0.5}, "did you mean 'temperature'"),
        ({"typical_p": 0.9}, "typical_p"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_by_name(make, kwargs, match):
    with pytest.raises(UnsupportedFeatureError, match=match):
        read_generation_kwargs(make(), kwargs)


@pytest.mark.parametrize(
    "kwargs",
    [{"do_sample": True}, {"until": [""]}, {"until": 3}, {"top_p": 2.0}, {"max_gen_toks": 0}],
    ids=str,
)
def test_values_out_of_range_are_refused(make, kwargs):
    with pytest.raises(RequestError):
        read_generation_kwargs(make(), kwargs)


def test_the_models_own_settings_hold_where_nothing_is_said(make):
    generator = make(repetition_penalty=1.3, do_sample=True, temperature=0.6, top_p=0.8)
    greedy = read_generation_kwargs(generator, {}).parameters
    assert (greedy.repetition_penalty, greedy.temperature) == (1.3, 0.0)
    sampling = read_generation_kwargs(generator, {"temperature": 0.9}).parameters
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.9, 0.8, 50)


def test_sampling_keeps_the_50_likeliest_tokens_as_transformers_does(make):
    generator = make()
    assert read_generation_kwargs(generator, {"temperature": 1.0}).parameters.top_k == 50
    assert read_generation_kwargs(generator, {"temperature": 1.0, "top_k": 7}).parameters.top_k == 7


def test_refused_settings_of_the_model_count_only_when_it_samples(make):
    generator = make(typical_p=0.5)
    read_generation_kwargs(generator, {})
    with pytest.raises(PacelineError, match="typical_p"):
        read_generation_kwargs(generator, {"temperature": 1.0})


@pytest.mark.parametrize(
    ("text", "until", "expected"),
    [
        ("a b\nc", ["\n"], "a b"),
        ("a b c", ["c", "b"], "a "),
        ("a b c", [], "a b c"),
        ("hm\n</think>\n yes\nno", ["\n"], "yes"),
    ],
)
def test_answers_are_cut(text, until, expected):
    assert cut_answer(text, until, "</think>") == expected


def test_speed_record_counts_over_all_answers(make):
    record = SpeedRecord()
    assert record.as_dict()["tokens_per_second"] == 0
    generator = make()
    asked = read_generation_kwargs(generator, {"max_gen_toks": 6}).parameters
    record.add(generator.generate_batch([[5, 6], [7, 8]], asked), 2.0)
    figures = record.as_dict()
    assert (figures["num_answers"], figures["num_output_tokens"]) == (2, 12)
    assert (figures["mean_acceptance_length"], figures["tokens_per_second"]) == (1.0, 6.0)
    assert "2 answers of 12 tokens in all, mean acceptance length 1.00, 6.0 tokens/s" in str(record)
