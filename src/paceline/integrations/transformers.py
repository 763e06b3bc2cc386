"""Hugging Face `model.generate(..., custom_generate=paceline.custom_generate, paceline=generator)`, sooner.

`generate` prepares its inputs and options, calls `custom_generate` in place of its own loop and returns what
that returns: the tensor it would have returned itself. The Generator, from `paceline.load(model=model, ...)`,
holds the target, the drafter and the cache, and shares the model's weights. Nothing is kept anywhere else.

What transformers does to a callable shapes the signature. An argument reaches us only if it is named there;
`streamer`, `tokenizer`, `assistant_model` and `synced_gpus` never do, and `stop_strings` is an error without
the tokenizer that was dropped. Hence our own `text_streamer` and `stop_texts`.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from paceline.engine.generator import GenerationResult, Generator
from paceline.errors import ConfigError, RequestError, UnsupportedFeatureError
from paceline.integrations.generation_options import PaddedPrompts, read_options
from paceline.sampling import SamplingParameters

# Arguments of `generate` that it does not hand on to a callable -> what to give instead.
_DROPPED: Mapping[str, str] = MappingProxyType(
    {
        "streamer": "give text_streamer= instead",
        "assistant_model": "choose a drafter when the Generator is made, paceline.load(..., drafter=...)",
        "synced_gpus": "the model must be whole on one device",
    }
)
_CACHE_NAMES = ("cache", "past_key_values")
# `use_cache` and `logits_to_keep` change how a forward is computed, never its result; the others are checked.
_UNDERSTOOD = ("attention_mask", "position_ids", "use_cache", "logits_to_keep", *_CACHE_NAMES)


def custom_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Seq[Any],
    stopping_criteria: Seq[Any],
    generation_config: Any,
    paceline: Generator | None = None,
    stop_texts: str | Seq[str] = (),
    text_streamer: Any = None,
    seed: int | None = None,
    **model_kwargs: Any,
) -> Any:
    """Decode a batch for `model.generate`; called by it, not by hand.

    Args:
        model: the model whose `generate` runs.
        input_ids: int64 [B, T], left padded.
        logits_processor: prepared by `generate`.
        stopping_criteria: likewise.
        generation_config: likewise.
        paceline: Generator of this model; make it once and pass it to every call.
        stop_texts: end a row when its new text contains one of these; the token that completes it is kept.
        text_streamer: receives the prompt, every token and the end, as `streamer` would (one row only).
        seed: of sampling; the first row gets the text that the Generator itself gives for it. By default it
            comes from torch's global generator, so that `torch.manual_seed` counts.
        model_kwargs: other inputs of the model's forward; transformers fixes this part of the signature.

    Returns:
        int64 [B, T + new], right padded; with `return_dict_in_generate`, a GenerateDecoderOnlyOutput of it.

    Raises:
        UnsupportedFeatureError: an option that would change the text, or the output, and is not served.
        ConfigError: `paceline` is missing, or is not this model's.
        RequestError: the inputs or an option's value cannot be served.
    """
    generator = _check_generator(model, paceline)
    _refuse_dropped_arguments()
    prompts = _read_prompts(input_ids, model_kwargs)
    parameters = replace(
        read_options(generation_config, logits_processor, stopping_criteria, prompts),
        stop=(stop_texts,) if isinstance(stop_texts, str) else tuple(stop_texts),
    )
    prompt_ids = [ids[start:] for ids, start in zip(input_ids.tolist(), prompts.num_pads, strict=True)]
    pad_id = _pad_id(generation_config, generator, prompt_ids, parameters)
    row_parameters = _seeded(parameters, seed, len(prompt_ids))
    if text_streamer is None:
        results = generator.generate_batch(prompt_ids, row_parameters)
    else:
        results = [_stream(generator, input_ids, prompt_ids, row_parameters, text_streamer)]
    _warn_of_context_limit(results, parameters.max_new_tokens, generator.target.context_len)
    sequences = _joined(input_ids, [result.token_ids for result in results], pad_id)
    if not generation_config.return_dict_in_generate:
        return sequences
    from transformers.generation import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=sequences)


def _check_generator(model: Any, generator: Generator | None) -> Generator:
    """The Generator, when it was made for this model as it is now."""
    if not isinstance(generator, Generator):
        raise ConfigError(
            f"paceline={generator!r}: give generate the Generator of this model, made once by "
            "paceline.load(model=model, tokenizer=tokenizer, drafter=...)"
        )
    target = generator.target
    made_for: Any = getattr(target, "model", None)
    if made_for is not model:
        raise ConfigError(
            f"the Generator was made for another model ({type(made_for).__name__}) than the one here, "
            f"a {type(model).__name__}: make one by paceline.load(model=model, tokenizer=tokenizer)"
        )
    weight = model.get_output_embeddings().weight
    before = f"{target.dtype} on {target.device} with {target.vocab_size} tokens"
    now = f"{weight.dtype} on {weight.device} with {weight.shape[0]} tokens"
    if now != before:
        raise ConfigError(
            f"the model is {now}, and it was {before} when its Generator was made: make it again by "
            "paceline.load(model=model, tokenizer=tokenizer)"
        )
    if model.training:
        raise ConfigError("the model is in training mode, where dropout acts: call model.eval() first")
    return generator


def _refuse_dropped_arguments() -> None:
    """Refuse arguments that transformers drops on the way; their only trace is in the frame of `generate`.

    Otherwise a `streamer` would receive the prompt and then nothing. Without frames (not CPython) they stay
    dropped.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") != "transformers.generation.utils":
        frame = frame.f_back
    given = {} if frame is None else frame.f_locals
    for name, instead in _DROPPED.items():
        if given.get(name) not in (None, False):
            raise UnsupportedFeatureError(f"{name} does not reach a custom_generate callable: {instead}")


def _read_prompts(input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> PaddedPrompts:
    """Lengths of the prompts; refuses inputs that plain ids with left padding do not express."""
    for name, value in model_kwargs.items():
        if name not in _UNDERSTOOD and value is not None:
            raise UnsupportedFeatureError(
                f"custom_generate reads input_ids, not the model input {name}: leave it out"
            )
    for name in _CACHE_NAMES:
        cache = model_kwargs.get(name)
        # One that `generate` has made is empty; the mark of a user's own one exists in newer releases only.
        if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0):
            raise UnsupportedFeatureError(
                f"custom_generate keeps a cache of its own and cannot use {name}: leave it out, and give the "
                "whole prompt"
            )
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.to(input_ids.device) != 0
    if mask.shape != input_ids.shape:
        raise RequestError(
            f"attention_mask is {list(mask.shape)}, input_ids {list(input_ids.shape)}: give one entry per id"
        )
    is_left_padded = mask[:, -1] & (mask[:, 1:] >= mask[:, :-1]).all(dim=1)
    if not is_left_padded.all():
        row = int((~is_left_padded).nonzero()[0, 0])
        raise UnsupportedFeatureError(
            f"attention_mask of row {row} is not zeros followed by ones: pad on the left "
            "(tokenizer.padding_side='left') and give the mask"
        )
    positions = mask.long().cumsum(dim=1) - 1
    given = model_kwargs.get("position_ids")
    if given is not None and not bool(((given.to(mask.device) == positions) | ~mask).all()):
        raise UnsupportedFeatureError("custom_generate counts positions by itself: leave out position_ids")
    return PaddedPrompts(input_ids.shape[1], tuple((~mask).sum(dim=1).tolist()))


def _seeded(parameters: SamplingParameters, seed: int | None, num_rows: int) -> list[SamplingParameters]:
    """The parameters of each row, with seeds of their own; greedy rows leave the global generator alone."""
    if parameters.is_greedy:
        return [parameters] * num_rows
    source = None if seed is None else torch.Generator().manual_seed(seed)
    seeds = torch.randint(2**63 - 1, (num_rows,), generator=source).tolist()
    if seed is not None:
        seeds[0] = seed
    return [replace(parameters, seed=own) for own in seeds]


def _stream(
    generator: Generator,
    input_ids: Tensor,
    prompt_ids: Seq[list[int]],
    row_parameters: Seq[SamplingParameters],
    text_streamer: Any,
) -> GenerationResult:
    """Decode one row and make the calls on the streamer that `generate` makes: prompt, every token, end."""
    if len(prompt_ids) > 1:
        raise UnsupportedFeatureError(
            f"text_streamer follows one row, not {len(prompt_ids)}: give one prompt"
        )
    text_streamer.put(input_ids.cpu())
    result: GenerationResult | None = None
    for event in generator.stream(prompt_ids[0], row_parameters[0]):
        for token_id in event.token_ids:
            text_streamer.put(torch.tensor([token_id]))
        result = event.result
    text_streamer.end()
    if result is None:
        raise RequestError("the stream ended before the answer did")
    return result


def _warn_of_context_limit(
    results: Seq[GenerationResult], max_new_tokens: int | None, context_len: int
) -> None:
    """Say so when a row stops for want of room: plain `generate` would run on past the limit, or crash."""
    cut = [row for row, result in enumerate(results) if result.finish_reason == "length"]
    cut = [row for row in cut if max_new_tokens is None or len(results[row].token_ids) < max_new_tokens]
    if cut:
        warnings.warn(f"rows {cut} stopped at the model's context of {context_len} tokens", stacklevel=3)


def _pad_id(
    generation_config: Any, generator: Generator, prompt_ids: Seq[list[int]], parameters: SamplingParameters
) -> int:
    """What fills rows that end early; refused before any work when it may be needed and there is none."""
    pad = getattr(generation_config, "_pad_token_tensor", None)
    if pad is not None:
        return int(pad)
    room, wanted = generator.target.context_len - max(map(len, prompt_ids)), parameters.max_new_tokens
    may_be_ragged = wanted is None or wanted > room or bool(parameters.stop)
    if len(prompt_ids) > 1 and may_be_ragged:
        raise RequestError("rows may end at different lengths and there is no pad_token_id: give one")
    return 0


def _joined(input_ids: Tensor, rows: Seq[Seq[int]], pad_id: int) -> Tensor:
    """[B, T] prompts and B ragged answers -> [B, T + new], as `generate` returns them."""
    longest = max(map(len, rows))
    filled = [[*ids, *[pad_id] * (longest - len(ids))] for ids in rows]
    return torch.cat([input_ids, torch.tensor(filled, dtype=input_ids.dtype, device=input_ids.device)], dim=1)
