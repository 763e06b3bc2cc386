"""Tensors of a checkpoint folder: one file or several, safetensors or torch's own."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from paceline.errors import CheckpointError

_SINGLE = ("model.safetensors", "pytorch_model.bin")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder by name.

    A single file needs no index beside it; shards are found through theirs. Torch files are read without
    running anything that they hold.

    Raises:
        CheckpointError: no file is there, or one of them is damaged.
    """
    for name in _SINGLE:
        if (folder / name).is_file():
            return _read(folder / name)
        index = folder / f"{name}.index.json"
        if index.is_file():
            try:
                shards = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
            except (ValueError, LookupError, AttributeError) as error:
                raise CheckpointError(f"{index}: is no index of shards ({error!r})") from None
            return {key: tensor for shard in shards for key, tensor in _read(folder / shard).items()}
    raise CheckpointError(f"{folder}: holds neither {' nor '.join(_SINGLE)}, nor an index of their shards")


def _read(path: Path) -> dict[str, Tensor]:
    """One file."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
    except Exception as error:  # pickle's own errors have no common base
        raise CheckpointError(f"{path}: is no file of tensors ({type(error).__name__})") from None
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise CheckpointError(f"{path}: holds something else than tensors by name")
    return tensors
