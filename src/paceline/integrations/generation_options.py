"""What a call of Hugging Face `generate` asks for, as SamplingParameters; the rest is refused by name.

`generate` turns its options into lists of logits processors and stopping criteria before it calls us, and the
user's own ones are in the same lists. The parameters are read from these objects, so that whatever is in the
lists is either honoured exactly or refused; options that leave no object behind are looked up in
`generation_config`.

Read `read_options` first, then `_READERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from paceline.errors import UnsupportedFeatureError
from paceline.sampling import SamplingParameters

_BEAMS = "paceline follows one continuation, without beams, contrast or constraints"
_DRAFTER = "the drafter is chosen when the Generator is made: paceline.load(..., drafter='prompt_lookup')"
_OUTPUTS = "only token ids are returned; log-probabilities come with the Generator's own generate"
_CACHE = "paceline keeps a preallocated cache of its own"
# Options that leave no processor and no criterion behind -> why they are refused.
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "num_beams": _BEAMS,
        "num_beam_groups": _BEAMS,
        "constraints": _BEAMS,
        "force_words_ids": _BEAMS,
        "penalty_alpha": _BEAMS,
        "dola_layers": _BEAMS,
        "prompt_lookup_num_tokens": _DRAFTER,
        "assistant_early_exit": _DRAFTER,
        "use_mtp": _DRAFTER,
        "speculation_type": _DRAFTER,
        "output_scores": _OUTPUTS,
        "output_logits": _OUTPUTS,
        "output_attentions": _OUTPUTS,
        "output_hidden_states": _OUTPUTS,
        "cache_implementation": _CACHE,
    }
)
_NEUTRAL: Mapping[str, object] = MappingProxyType(
    {"num_beams": 1, "num_beam_groups": 1, "cache_implementation": "dynamic"}
)


@dataclass(frozen=True, slots=True)
class PaddedPrompts:
    """The prompts of a batch as `generate` counts them.

    Attributes:
        padded_len: tokens of a row, left padding included (T).
        num_pads: padding tokens of each row.
    """

    padded_len: int
    num_pads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Call:
    """What a processor is judged by."""

    prompts: PaddedPrompts
    do_sample: bool
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Reader:
    """How one class of logits processors is understood.

    Attributes:
        rank: place in the order in which paceline processes logits; those of equal rank commute.
        read: the parameters that an instance stands for.
    """

    rank: int
    read: Callable[[Any, _Call], dict[str, Any]]


def read_options(
    generation_config: Any,
    logits_processor: Seq[Any],
    stopping_criteria: Seq[Any],
    prompts: PaddedPrompts,
) -> SamplingParameters:
    """The parameters of a call, the same for each of its rows.

    Args:
        generation_config: as `generate` prepared it.
        logits_processor: prepared list, the user's own processors included.
        stopping_criteria: prepared list, the user's own criteria included.
        prompts: lengths that processors and criteria count from.

    Raises:
        UnsupportedFeatureError: an option, a processor or a criterion is not served; the message names it.
    """
    for name, reason in _REFUSED.items():
        value = getattr(generation_config, name, None)
        if value and value != _NEUTRAL.get(name):
            raise _unsupported(f"{name}={value!r}: {reason}")
    do_sample = bool(generation_config.do_sample)
    changes = _read_criteria(stopping_criteria, prompts)
    changes["temperature"] = 1.0 if do_sample else 0.0
    call = _Call(prompts, do_sample, changes["eos_token_ids"])
    return SamplingParameters().updated(changes | _read_processors(logits_processor, call))


def _read_criteria(stopping_criteria: Seq[Any], prompts: PaddedPrompts) -> dict[str, Any]:
    """Length limit and end-of-sequence ids."""
    changes: dict[str, Any] = {"max_new_tokens": None, "eos_token_ids": ()}
    for criterion in stopping_criteria:
        name = _class_name(criterion, "transformers.generation.stopping_criteria")
        if name == "MaxLengthCriteria":
            changes["max_new_tokens"] = criterion.max_length - prompts.padded_len
        elif name == "EosTokenCriteria":
            changes["eos_token_ids"] = _ends(criterion)
        else:
            hint = ": give stop_texts instead" if name == "StopStringCriteria" else ""
            raise _unsupported(f"the stopping criterion {name}{hint}")
    return changes


def _read_processors(logits_processor: Seq[Any], call: _Call) -> dict[str, Any]:
    """The parameters behind a list of processors, which must come in an order that means the same here."""
    changes: dict[str, Any] = {"logit_bias": {}, "min_new_tokens": 0}
    names: list[str] = []
    for processor in logits_processor:
        name = _class_name(processor, "transformers.generation.logits_process")
        reader = _READERS.get(name)
        if reader is None:
            raise _unsupported(f"the logits processor {name}: leave out what adds it")
        if name in names:
            raise _unsupported(f"two {name}: give one")
        if names and reader.rank < _READERS[names[-1]].rank:
            raise _unsupported(f"{name} after {names[-1]}: here it acts before, which is not the same")
        names.append(name)
        found = reader.read(processor, call)
        for token_id, amount in found.pop("logit_bias", {}).items():
            changes["logit_bias"][token_id] = changes["logit_bias"].get(token_id, 0.0) + amount
        changes["min_new_tokens"] = max(changes["min_new_tokens"], found.pop("min_new_tokens", 0))
        changes |= found
    return changes


def _unsupported(what: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(f"custom_generate does not support {what}")


def _class_name(item: Any, module: str) -> str:
    """Name of the class, with its module when that is another: a namesake is not transformers' own."""
    kind = type(item)
    return kind.__name__ if kind.__module__ == module else f"{kind.__module__}.{kind.__qualname__}"


def _ends(owner: Any) -> tuple[int, ...]:
    """End-of-sequence ids of a criterion or processor; a negative id is a common way to say "none"."""
    return tuple(i for i in owner.eos_token_id.tolist() if i >= 0)


def _require(processor: Any, name: str, is_fine: bool) -> None:
    """Refuse a known processor with a setting that has no counterpart here."""
    if not is_fine:
        raise _unsupported(f"{type(processor).__name__} with {name}={getattr(processor, name)!r}")


def _sequence_bias(processor: Any, call: _Call) -> dict[str, Any]:  # noqa: ARG001
    longer = next((ids for ids in processor.sequence_bias if len(ids) > 1), None)
    if longer is not None:
        raise _unsupported(f"sequence_bias of several tokens, here {longer}: bias single ones")
    return {"logit_bias": {ids[0]: float(bias) for ids, bias in processor.sequence_bias.items()}}


def _repetition_penalty(processor: Any, call: _Call) -> dict[str, Any]:
    ignored = processor.prompt_ignore_length
    # Newer releases leave out the padding of each row, as we do: paceline never sees padding.
    is_padding = hasattr(ignored, "tolist") and ignored.tolist() == list(call.prompts.num_pads)
    _require(processor, "prompt_ignore_length", is_padding or ignored is None or ignored == 0)
    return {"repetition_penalty": float(processor.penalty)}


def _no_repeat_ngram_size(processor: Any, call: _Call) -> dict[str, Any]:  # noqa: ARG001
    return {"no_repeat_ngram_size": processor.ngram_size}


def _bad_words(processor: Any, call: _Call) -> dict[str, Any]:  # noqa: ARG001
    words = [tuple(map(int, ids)) for ids in processor.sequence_bias]
    return {
        "bad_words": tuple(ids for ids in words if len(ids) > 1),
        # `generate` has taken out the end-of-sequence ids: a single token that is left is never allowed.
        "logit_bias": {ids[0]: float("-inf") for ids in words if len(ids) == 1},
    }


def _suppressed_tokens(processor: Any, call: _Call) -> dict[str, Any]:  # noqa: ARG001
    return {"logit_bias": dict.fromkeys(processor.suppress_tokens.tolist(), float("-inf"))}


def _min_length(processor: Any, call: _Call) -> dict[str, Any]:
    _require(processor, "eos_token_id", set(_ends(processor)) == set(call.eos_token_ids))
    return {"min_new_tokens": max(processor.min_length - call.prompts.padded_len, 0)}


def _min_new_tokens(processor: Any, call: _Call) -> dict[str, Any]:
    _require(processor, "eos_token_id", set(_ends(processor)) == set(call.eos_token_ids))
    min_len = processor.prompt_length_to_skip + processor.min_new_tokens
    return {"min_new_tokens": max(min_len - call.prompts.padded_len, 0)}


def _temperature(processor: Any, call: _Call) -> dict[str, Any]:
    return {"temperature": float(processor.temperature)} if call.do_sample else {}


def _filter(name: str) -> Callable[[Any, _Call], dict[str, Any]]:
    """Reader of a filter; greedy decoding takes the likeliest token with or without it."""

    def read(processor: Any, call: _Call) -> dict[str, Any]:
        if not call.do_sample:
            return {}
        # Top-k has this minimum in its k already.
        _require(processor, "min_tokens_to_keep", name == "top_k" or processor.min_tokens_to_keep == 1)
        _require(processor, "filter_value", processor.filter_value == float("-inf"))
        return {name: getattr(processor, name)}

    return read


def _nothing(processor: Any, call: _Call) -> dict[str, Any]:  # noqa: ARG001
    """Renormalised logits have the same argmax and the same law."""
    return {}


# A ban commutes with every penalty, so these share a rank; bias, temperature and filters have their places.
_READERS: Mapping[str, _Reader] = MappingProxyType(
    {
        "SequenceBiasLogitsProcessor": _Reader(0, _sequence_bias),
        "RepetitionPenaltyLogitsProcessor": _Reader(1, _repetition_penalty),
        "NoRepeatNGramLogitsProcessor": _Reader(1, _no_repeat_ngram_size),
        "NoBadWordsLogitsProcessor": _Reader(1, _bad_words),
        "MinLengthLogitsProcessor": _Reader(1, _min_length),
        "MinNewTokensLengthLogitsProcessor": _Reader(1, _min_new_tokens),
        "SuppressTokensLogitsProcessor": _Reader(1, _suppressed_tokens),
        "TemperatureLogitsWarper": _Reader(2, _temperature),
        "TopKLogitsWarper": _Reader(3, _filter("top_k")),
        "TopPLogitsWarper": _Reader(4, _filter("top_p")),
        "MinPLogitsWarper": _Reader(5, _filter("min_p")),
        "LogitNormalization": _Reader(6, _nothing),
    }
)
