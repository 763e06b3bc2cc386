"""What all kinds of head folders share: written as a whole, read strictly."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from paceline.errors import CheckpointError


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """A fresh folder to write into; it takes the place of `folder` when the block ends without an error."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        fresh = Path(scratch) / "new"
        fresh.mkdir()
        yield fresh
        for file in fresh.iterdir():
            file.chmod(0o644)
        if folder.exists():
            folder.rename(Path(scratch) / "old")
        fresh.rename(folder)


def check_files(folder: Path, names: Seq[str]) -> None:
    """Raise CheckpointError unless the folder has all files of a head."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such head folder")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder}: {', '.join(missing)} missing, a head folder has {', '.join(names)}")


def read_tensors(path: Path, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Floating tensors of a file that has exactly those, as fp32.

    Args:
        path: a safetensors file.
        wanted: shape by name.
    """
    tensors = read_all_tensors(path)
    for what, names in (
        ("missing", wanted.keys() - tensors.keys()),
        ("unknown", tensors.keys() - wanted.keys()),
    ):
        if names:
            raise CheckpointError(
                f"{path}: {what} tensors {sorted(names)}, it must hold exactly {sorted(wanted)}"
            )
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != wanted[name]:
            raise CheckpointError(
                f"{path}: {name} has shape {tuple(tensor.shape)}, config.json asks for {wanted[name]}"
            )
        if not tensor.is_floating_point():
            raise CheckpointError(f"{path}: {name} has dtype {tensor.dtype}, it must be a float")
        if not tensor.isfinite().all():
            raise CheckpointError(f"{path}: {name} holds values that are not finite: the training diverged")
    return {name: tensor.to(torch.float32) for name, tensor in tensors.items()}


def read_all_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors ({error})") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: is not JSON ({error})") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: is a {type(document).__name__}, it must be a JSON object")
    return document


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a JSON object."""
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
