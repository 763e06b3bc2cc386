"""The rivals by name, and the arms that were asked for."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from paceline.bench.peers.base import PeerArm
from paceline.bench.peers.economize import CYCLE_LENGTHS, build_economize
from paceline.bench.peers.llama_cpp import PRECISIONS, build_llama_cpp
from paceline.config import check_known
from paceline.engine.generator import Generator
from paceline.errors import ConfigError, UnsupportedFeatureError

PEERS = (*PRECISIONS, *CYCLE_LENGTHS)


def check_peers(names: Seq[str], max_batch_size: int) -> None:
    """Refuse what cannot be measured before anything is loaded.

    Raises:
        ConfigError: a name that is not known.
        UnsupportedFeatureError: a batch for a rival that decodes one prompt at a time, or a name given twice.
    """
    for name in names:
        check_known("peer", name, PEERS)
        if names.count(name) > 1:
            raise UnsupportedFeatureError(f"peer {name!r} is asked for twice: name each once")
        if name in PRECISIONS and max_batch_size > 1:
            raise UnsupportedFeatureError(
                f"peer {name!r} decodes one prompt at a time, and the largest batch is {max_batch_size}: use "
                "--batch-size 1"
            )


def peer_arms(
    generator: Generator, names: Seq[str], progress: Callable[[str], None] | None = None
) -> list[PeerArm]:
    """An arm for every rival, on the model behind a generator's target.

    Args:
        generator: whose model, tokenizer and ends of text are used.
        names: of `PEERS`.
        progress: told in one line what takes time.
    """
    check_peers(names, 1)
    if names:
        _check_model(generator)
    return [
        build_llama_cpp(name, generator, progress=progress)
        if name in PRECISIONS
        else build_economize(name, generator)
        for name in names
    ]


def _check_model(generator: Generator) -> None:
    """Rivals decode the weights of the model in memory."""
    model = getattr(generator.target, "model", None)
    if model is None:
        raise UnsupportedFeatureError(
            f"target {type(generator.target).__name__} wraps no Hugging Face model to hand to a rival: leave "
            "--peer empty"
        )
    if any(parameter.numel() == 0 for parameter in model.parameters()):
        raise ConfigError(
            "the model's weights were packed for the fast path and dropped: load it with keep_model=True to "
            "hand it to a rival"
        )
