"""What a request of lm-evaluation-harness asks, as SamplingParameters; the rest is refused by name.

Tasks write `generation_kwargs` in the words of several libraries. They mean here what they mean for the
harness's own `hf` model: an option that is not given comes from the model's `generation_config`, and sampling
without `top_k` keeps the 50 likeliest tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

from paceline.config import nearest_name
from paceline.engine.generator import Generator
from paceline.engine.model_defaults import default_parameters
from paceline.errors import RequestError, UnsupportedFeatureError
from paceline.sampling import SamplingParameters

DEFAULT_MAX_NEW_TOKENS = 256
# In the order in which the harness takes the first that is given.
_LENGTH_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
# Fields of SamplingParameters under the same name.
_SAME_NAMES = (
    "frequency_penalty",
    "min_new_tokens",
    "min_p",
    "no_repeat_ngram_size",
    "presence_penalty",
    "repetition_penalty",
    "top_k",
    "top_p",
)
_READ = ("until", "do_sample", "temperature", *_LENGTH_NAMES, *_SAME_NAMES)
# Values that ask for nothing.
_NEUTRAL: Mapping[str, object] = MappingProxyType(
    {"num_beams": 1, "num_return_sequences": 1, "use_cache": True}
)
_INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "max_length": "give max_gen_toks, which counts new tokens only",
        "seed": "give the harness's own --seed: one seed in all requests would draw alike in each",
        "stop": "give until",
        "stop_strings": "give until",
        "num_beams": "paceline follows one continuation",
    }
)


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """How one prompt is to be answered.

    Attributes:
        parameters: without a seed.
        until: strings that end the answer; neither they nor what follows belong to it.
        max_new_tokens: room that the prompt must leave.
    """

    parameters: SamplingParameters
    until: tuple[str, ...]
    max_new_tokens: int


def read_generation_kwargs(generator: Generator, kwargs: Mapping[str, Any]) -> EvaluationRequest:
    """Read the `generation_kwargs` of one request.

    Args:
        generator: whose model's defaults hold where nothing is said.
        kwargs: as the task and `--gen_kwargs` give them; not changed.

    Raises:
        UnsupportedFeatureError: an option is unknown or not served; the message names it.
        RequestError: a value is out of range.
    """
    for name, value in kwargs.items():
        if name not in _READ and not (name in _NEUTRAL and value == _NEUTRAL[name]):
            instead = _INSTEAD.get(name, f"did you mean {nearest_name(name, _READ)!r}?")
            raise UnsupportedFeatureError(f"generation option {name}={value!r} is not served: {instead}")
    until = _read_until(kwargs.get("until"))
    lengths = [kwargs[name] for name in _LENGTH_NAMES if kwargs.get(name) is not None]
    max_new_tokens = int(lengths[0]) if lengths else DEFAULT_MAX_NEW_TOKENS
    temperature = _temperature(kwargs.get("do_sample"), float(kwargs.get("temperature") or 0.0))
    base = _sampling_defaults(generator) if temperature else generator.default_parameters
    changes = {name: kwargs[name] for name in _SAME_NAMES if kwargs.get(name) is not None}
    changes |= {"max_new_tokens": max_new_tokens, "temperature": temperature, "stop": until}
    return EvaluationRequest(base.updated(changes), until, max_new_tokens)


def cut_answer(text: str, until: Seq[str], think_end: str | None = None) -> str:
    """The answer proper: behind the thinking, and in front of the first string that ends it."""
    if think_end:
        text = text.split(think_end)[-1].lstrip()
    for term in until:
        text = text.split(term)[0]
    return text


def _read_until(until: object) -> tuple[str, ...]:
    """One string or several; none when nothing is given."""
    if until is None:
        return ()
    if isinstance(until, str):
        return (until,)
    if isinstance(until, list | tuple) and all(isinstance(term, str) for term in until):
        return tuple(until)
    raise RequestError(f"until is {until!r}: it must be a string or a list of strings")


def _temperature(do_sample: bool | None, temperature: float) -> float:
    """0 for greedy decoding, which `do_sample=false` asks for whatever the temperature."""
    if do_sample is None:
        return temperature
    if not do_sample:
        return 0.0
    if temperature == 0:
        raise RequestError(
            "do_sample=true with temperature 0: give a temperature above 0, or do_sample=false"
        )
    return temperature


def _sampling_defaults(generator: Generator) -> SamplingParameters:
    """The model's defaults as they are when it samples, whether its own configuration does or not."""
    config = copy.copy(getattr(getattr(generator.target, "model", None), "generation_config", None))
    if config is None:
        return generator.default_parameters
    config.do_sample = True
    return default_parameters(SimpleNamespace(generation_config=config))
