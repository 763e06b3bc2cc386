"""What a model's own configuration asks of decoding, where neither request nor command line says more.

Everything in a `generation_config` that would change the text is either taken over or refused by name: a
setting that is silently dropped makes an answer differ from `model.generate` for no visible reason. The one
exception is `max_length`, which many models carry as the size of their context: how long an answer may be is
the request's to say (`max_new_tokens`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from paceline.errors import UnsupportedFeatureError
from paceline.sampling import SamplingParameters

# Hugging Face samples from the 50 likeliest tokens where a sampling configuration says nothing about top-k.
DEFAULT_TOP_K = 50
# Settings that change the text and are not offered -> values that ask for nothing. None and False never do.
REFUSED: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "begin_suppress_tokens": ([],),
        "constraints": ([],),
        "diversity_penalty": (0.0,),
        "dola_layers": (),
        "encoder_no_repeat_ngram_size": (0,),
        "encoder_repetition_penalty": (1.0,),
        "exponential_decay_length_penalty": (),
        "force_words_ids": ([],),
        "forced_bos_token_id": (),
        "forced_eos_token_id": (),
        "guidance_scale": (1.0,),
        "max_time": (),
        "min_length": (0,),
        "num_beam_groups": (1,),
        "num_beams": (1,),
        "penalty_alpha": (0.0,),
        "sequence_bias": ({}, []),
        "stop_strings": ([], ()),
        "token_healing": (),
        "watermarking_config": (),
    }
)
REFUSED_WHEN_SAMPLING: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {"epsilon_cutoff": (0.0,), "eta_cutoff": (0.0,), "top_h": (1.0,), "typical_p": (1.0,)}
)


def default_parameters(model: Any) -> SamplingParameters:
    """Sampling parameters of the model's `generation_config`; greedy unless it says `do_sample`.

    Raises:
        UnsupportedFeatureError: it asks for something that paceline does not offer.
    """
    config = getattr(model, "generation_config", None)
    if config is None:
        return SamplingParameters()
    _refuse(config, REFUSED)
    changes: dict[str, object] = {}
    for name in ("repetition_penalty", "no_repeat_ngram_size", "max_new_tokens", "min_new_tokens"):
        value = getattr(config, name, None)
        if value is not None:
            changes[name] = value
    if bad_words := getattr(config, "bad_words_ids", None):
        changes["bad_words"] = tuple(tuple(word) for word in bad_words)
    if suppressed := getattr(config, "suppress_tokens", None):
        changes["logit_bias"] = dict.fromkeys(suppressed, float("-inf"))
    if getattr(config, "do_sample", False):
        _refuse(config, REFUSED_WHEN_SAMPLING)
        neutral = {"temperature": 1.0, "top_k": DEFAULT_TOP_K, "top_p": 1.0, "min_p": 0.0}
        for name, value in neutral.items():
            found = getattr(config, name, None)
            changes[name] = value if found is None else found
    return SamplingParameters().updated(changes)


def eos_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """Ids that end a text: the generation config's, else the model's, else the tokenizer's; possibly none."""
    for owner in (getattr(model, "generation_config", None), getattr(model, "config", None), tokenizer):
        found = getattr(owner, "eos_token_id", None)
        if isinstance(found, int):
            return [found]
        if found:
            return [int(i) for i in found]
    return []


def _refuse(config: Any, settings: Mapping[str, tuple[object, ...]]) -> None:
    """Raise for the first of `settings` that asks for something."""
    for name, neutral in settings.items():
        value = getattr(config, name, None)
        if value is not None and value is not False and value not in neutral:
            raise UnsupportedFeatureError(
                f"the model's generation_config has {name}={value!r}, which paceline does not offer: drop it"
            )
