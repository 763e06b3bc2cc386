"""A model's own generation_config is followed or refused, never dropped."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

from paceline.drafters.none import NoDrafter
from paceline.engine.generator import Generator
from paceline.engine.model_defaults import default_parameters
from paceline.errors import UnsupportedFeatureError
from paceline.sampling import SamplingParameters
from paceline.targets.huggingface import HuggingFaceTarget
from paceline.testing import tiny_model


def defaults_of(**settings):
    return default_parameters(SimpleNamespace(generation_config=GenerationConfig(**settings)))


def test_a_plain_configuration_is_greedy_decoding():
    assert defaults_of() == SamplingParameters()
    assert default_parameters(SimpleNamespace()) == SamplingParameters()


def test_sampling_without_top_k_filters_as_hugging_face_does():
    assert defaults_of(do_sample=True, top_p=0.9) == SamplingParameters(temperature=1.0, top_k=50, top_p=0.9)
    assert defaults_of(do_sample=True, top_k=0).top_k == 0
    assert defaults_of(temperature=0.7, top_k=3) == SamplingParameters()  # greedy: filters have no say


def test_lengths_and_bans_are_taken_over_and_give_the_text_of_generate(tokenizer):
    model = tiny_model("llama")
    prompt = [5, 6, 7, 8]
    plain = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    first, second, third = plain[0, 4:7].tolist()
    model.generation_config = GenerationConfig(
        suppress_tokens=[first],
        bad_words_ids=[[second], [third, second]],
        max_new_tokens=12,
        repetition_penalty=1.2,
        do_sample=False,
        eos_token_id=None,
    )
    expected = model.generate(torch.tensor([prompt]))[0, 4:].tolist()
    assert expected != plain[0, 4:].tolist()
    own = default_parameters(model)
    generator = Generator(HuggingFaceTarget(model), tokenizer, NoDrafter(), default_parameters=own)
    assert list(generator.generate(prompt).token_ids) == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 2},
        {"guidance_scale": 1.5},
        {"begin_suppress_tokens": [3]},
        {"forced_eos_token_id": 2},
        {"encoder_repetition_penalty": 1.2},
        {"stop_strings": ["x"]},
        {"min_length": 7},
        {"do_sample": True, "typical_p": 0.5},
    ],
    ids=str,
)
def test_settings_that_are_not_offered_are_refused_by_name(settings):
    name = list(settings)[-1]
    with pytest.raises(UnsupportedFeatureError, match=f"generation_config has {name}="):
        defaults_of(**settings)


def test_settings_that_only_matter_to_sampling_do_not_disturb_greedy_decoding():
    assert defaults_of(typical_p=0.5) == SamplingParameters()
