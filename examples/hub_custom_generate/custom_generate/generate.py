"""`model.generate(..., custom_generate="<this folder or repository>", trust_remote_code=True)` with paceline.

transformers calls `generate` below in place of its own, with the same arguments and the model. The Generator
(drafter, cache, measured costs) is made at the first call and kept on the model, so it lives as long as the
model does; another choice of options makes another one.
"""

from __future__ import annotations

import copy
from typing import Any

import paceline

# transformers finds this file with these arguments and hands them on; they say nothing about the text.
_HUB_ARGUMENTS = frozenset(
    {
        "cache_dir",
        "force_download",
        "local_files_only",
        "proxies",
        "repo_type",
        "revision",
        "subfolder",
        "token",
    }
)
_ATTRIBUTE = "_paceline_generators"


class _Generators(dict[Any, Any]):
    """Generators of one model; a copied or pickled model starts without any."""

    def __reduce__(self) -> Any:
        return (dict, ())

    def __deepcopy__(self, memo: Any) -> _Generators:
        return _Generators()


def generate(
    inputs: Any = None,
    generation_config: Any = None,
    *,
    model: Any,
    tokenizer: Any = None,
    streamer: Any = None,
    stop_strings: str | list[str] | None = None,
    drafter: str = "prompt_lookup",
    head: str | None = None,
    verifier: str | None = None,
    num_speculative_tokens: int | str = "auto",
    execution: str = "auto",
    seed: int | None = None,
    **arguments: Any,
) -> Any:
    """Do what `model.generate` does, with drafts.

    Args:
        inputs: prompt ids, as `generate` takes them.
        generation_config: likewise.
        model: the model whose `generate` was called.
        tokenizer: of the model; by default the one in the folder or repository that the model was loaded
            from.
        streamer: receives the prompt, every token and the end; one row only.
        stop_strings: strings that end a row.
        drafter: `prompt_lookup` (needs no training), `phrase`, `eagle3:full`, ..., or `none`.
        head: folder of a trained draft head.
        verifier: by default lossless: `greedy` without sampling, `sampling` with it.
        num_speculative_tokens: most drafted tokens a round; `auto` drafts what pays on this machine.
        execution: `fast` packs a second copy of the weights, which must not change afterwards.
        seed: of sampling.
        arguments: everything else that `generate` takes.

    Returns:
        What `model.generate` returns.
    """
    if stop_strings is None:
        named = (getattr(one, "stop_strings", None) for one in (generation_config, model.generation_config))
        stop_strings = next(filter(None, named), None)
    if generation_config is not None:
        generation_config = _without_stops(generation_config)
    choice = {
        "drafter": drafter,
        "head": head,
        "verifier": verifier,
        "num_speculative_tokens": num_speculative_tokens,
        "execution": execution,
    }
    own = model.generation_config
    try:
        # What an argument leaves open is taken from here, stop strings too.
        model.generation_config = _without_stops(own)
        # A model loaded from a repository with this file has its `generate` replaced: the class has the real
        # one.
        return type(model).generate(
            model,
            inputs,
            generation_config,
            custom_generate=paceline.custom_generate,
            paceline=_generator_of(model, tokenizer, choice),
            stop_texts=stop_strings or (),
            text_streamer=streamer,
            seed=seed,
            **{name: value for name, value in arguments.items() if name not in _HUB_ARGUMENTS},
        )
    finally:
        model.generation_config = own


def _without_stops(config: Any) -> Any:
    """The same settings but for the stop strings, which are followed here."""
    if not getattr(config, "stop_strings", None):
        return config
    config = copy.copy(config)
    config.stop_strings = None
    return config


def _generator_of(model: Any, tokenizer: Any, choice: dict[str, Any]) -> paceline.Generator:
    """The Generator of a model for a choice of options; made once, and again when the model was changed."""
    weight = model.get_output_embeddings().weight
    state = (weight.dtype, weight.device, weight.shape[0])
    made = model.__dict__.get(_ATTRIBUTE)
    if not isinstance(made, _Generators):
        made = _Generators()
        setattr(model, _ATTRIBUTE, made)
    for key in [key for key in made if key[0] != state]:
        del made[key]
    key = (state, *choice.values())
    if key not in made:
        made[key] = paceline.load(model=model, tokenizer=tokenizer or _tokenizer_of(model), **choice)
    return made[key]


def _tokenizer_of(model: Any) -> Any:
    """The tokenizer that lies beside the model's weights."""
    from transformers import AutoTokenizer

    name = model.config._name_or_path
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:
        raise paceline.ConfigError(
            f"no tokenizer is found where this model is from ({name!r}): give generate tokenizer="
        ) from error
