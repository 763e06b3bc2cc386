"""Shards: the files that recorded answers lie in.

Every shard is one safetensors file with a few hundred answers, written to a temporary name and then renamed,
so whatever carries the final name is whole. A prompt is known by its key, and one answered twice counts once.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.errors import CheckpointError, ConfigError


@dataclass(frozen=True, slots=True)
class Answer:
    """One answered prompt.

    Attributes:
        key: of the prompt.
        root_key: of the first prompt of its conversation.
        source: of the prompt.
        prompt_ids: int64 [P].
        output_ids: int64 [T].
        states: [T, 1 + L, D], final hidden state and inputs of the recorded layers; row j produced newest
            token j:
            the last prompt id for 0, output j - 1 after that.
        is_complete: the target ended the answer itself; False when it was cut by length.
    """

    key: str
    root_key: str
    source: str
    prompt_ids: Tensor
    output_ids: Tensor
    states: Tensor
    is_complete: bool

    @property
    def newest_ids(self) -> Tensor:
        """int64 [T]: the newest token that the drafter knows at each row."""
        return torch.cat([self.prompt_ids[-1:], self.output_ids[:-1]])


def write_shard(path: Path, answers: Seq[Answer]) -> None:
    """Write answers to one safetensors file, atomically."""
    records = [[a.key, a.root_key, a.source] for a in answers]
    tensors = {
        "prompt_ids": torch.cat([a.prompt_ids for a in answers]).to(torch.int32),
        "prompt_lens": torch.tensor([len(a.prompt_ids) for a in answers]),
        "output_ids": torch.cat([a.output_ids for a in answers]).to(torch.int32),
        "output_lens": torch.tensor([len(a.output_ids) for a in answers]),
        "states": torch.cat([a.states for a in answers]),
        "is_complete": torch.tensor([a.is_complete for a in answers]),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    save_file(tensors, str(partial), metadata={"answers": json.dumps(records)})
    os.replace(partial, path)


def shard_paths(folder: Path) -> list[Path]:
    """Finished shards, oldest first."""
    return sorted(folder.glob("shard-*.safetensors"))


def read_shard(path: Path) -> Iterator[Answer]:
    """Answers of one shard; their states are views of one memory-mapped tensor."""
    try:
        with safe_open(str(path), framework="pt") as file:
            records = json.loads(file.metadata()["answers"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:
        raise CheckpointError(
            f"{path.name} is damaged ({error}): delete it, and its prompts are answered again"
        ) from None
    prompts = tensors["prompt_ids"].long().split(tensors["prompt_lens"].tolist())
    outputs = tensors["output_ids"].long().split(tensors["output_lens"].tolist())
    states = tensors["states"].split(tensors["output_lens"].tolist())
    complete = tensors["is_complete"].tolist()
    for record, prompt, output, rows, whole in zip(records, prompts, outputs, states, complete, strict=True):
        yield Answer(record[0], record[1], record[2], prompt, output, rows, whole)


def read_answers(folder: Path) -> Iterator[Answer]:
    """Answers of all finished shards, oldest first, each prompt once."""
    seen: set[str] = set()
    for path in shard_paths(folder):
        for answer in read_shard(path):
            if answer.key not in seen:
                seen.add(answer.key)
                yield answer


def predicted_bytes(num_tokens: int, hidden_size: int, num_layers: int = 0) -> int:
    """Disk for the shards of `num_tokens` output tokens: states in bf16, ids, and prompts as long."""
    return num_tokens * ((1 + num_layers) * hidden_size * 2 + 8)


def check_disk(folder: Path, num_bytes: int, max_bytes: int | None, what: str = "answers") -> None:
    """Raise ConfigError when the predicted shards exceed the limit or the free space.

    Args:
        folder: on the disk in question; its nearest existing parent is asked.
        num_bytes: predicted.
        max_bytes: the user's limit; None for the free space alone.
        what: they hold.
    """
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    held = sum(path.stat().st_size for path in shard_paths(folder)) if folder.exists() else 0
    wanted = max(num_bytes - held, 0)
    if max_bytes is not None and num_bytes > max_bytes:
        raise ConfigError(
            f"the {what} will take {num_bytes / 1e9:.2f} GB and the limit is {max_bytes / 1e9:.2f} GB: "
            "raise --max-disk-gb or lower --num-tokens"
        )
    if wanted > free:
        raise ConfigError(f"the {what} will take {wanted / 1e9:.2f} GB more and {free / 1e9:.2f} GB are free")
