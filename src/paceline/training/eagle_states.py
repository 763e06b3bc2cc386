"""The target's states at every position of the texts of an EAGLE fit: online, or read once and kept."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.targets.base import TargetModel
from paceline.training.capture import Conversation, capture_states


class StateSource(Protocol):
    """Gives the states of texts."""

    def states(self, texts: Seq[Conversation]) -> list[Tensor]:
        """Per text [S, 1 + L, D] in bf16: final hidden state, then the inputs of the feature layers."""


class OnlineStates:
    """The target reads the texts whenever they are asked for.

    Args:
        target: frozen.
        feature_layers: layers whose inputs are wanted.
    """

    def __init__(self, target: TargetModel, feature_layers: Seq[int]) -> None:
        self._target = target
        self._layers = tuple(feature_layers)

    def states(self, texts: Seq[Conversation]) -> list[Tensor]:
        """See `StateSource`."""
        return capture_states(self._target, [text.token_ids for text in texts], feature_layers=self._layers)


class CachedStates:
    """Reads every text once; what it read lies in a folder, a file per text, and serves later runs too.

    Args:
        source: reads texts that are not there yet.
        folder: of these states alone: the same target, dtype and layers.
    """

    def __init__(self, source: StateSource, folder: Path) -> None:
        self._source = source
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def states(self, texts: Seq[Conversation]) -> list[Tensor]:
        """See `StateSource`.

        Raises:
            CheckpointError: a file is damaged.
        """
        paths = [self._path(text) for text in texts]
        missing = [i for i, path in enumerate(paths) if not path.exists()]
        if missing:
            for i, found in zip(missing, self._source.states([texts[i] for i in missing]), strict=True):
                partial = paths[i].with_name(f"{paths[i].name}.{os.getpid()}.partial")
                save_file({"states": found.contiguous()}, partial)
                partial.replace(paths[i])
        return [_read(path) for path in paths]

    def _path(self, text: Conversation) -> Path:
        """File of a text."""
        digest = hashlib.sha256(text.token_ids.numpy().tobytes()).hexdigest()[:24]
        return self._folder / f"shard-{digest}.safetensors"


def _read(path: Path) -> Tensor:
    """The states in a file."""
    try:
        return load_file(path)["states"]
    except (OSError, SafetensorError, KeyError) as error:
        raise CheckpointError(f"{path.name} is damaged ({error}): delete it, and it is made again") from error
