"""Whole conversations for heads that attend: prompt and answer, and which tokens are to be learned."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.training.capture import Conversation
from paceline.training.loops import loop_start
from paceline.training.shards import Answer, read_answers

DEFAULT_MAX_LEN = 1024
LENGTH_STEP = 32
"""Lengths that count as equal when texts are put into groups."""


def read_texts(
    folder: Path,
    belongs: Callable[[Answer], bool],
    max_len: int = DEFAULT_MAX_LEN,
    *,
    drop_loops: bool = False,
) -> list[Conversation]:
    """Recorded answers behind their prompts; without those that teach nothing.

    Args:
        folder: of the shards.
        belongs: which answers are wanted.
        max_len: tokens of a text; what lies behind is cut off.
        drop_loops: answers end where they start to go round in circles (`loops.loop_start`).

    Raises:
        ConfigError: none is left.
    """
    texts = []
    for answer in read_answers(folder):
        if belongs(answer):
            output_ids = answer.output_ids
            if drop_loops:
                output_ids = output_ids[: loop_start(output_ids.tolist())]
            token_ids = torch.cat([answer.prompt_ids, output_ids])[:max_len]
            text = Conversation(token_ids, torch.arange(len(token_ids)) >= len(answer.prompt_ids))
            # A head says something from the second token behind a position on.
            if bool(text.is_answer[2:].any()):
                texts.append(text)
    if not texts:
        raise ConfigError("no recorded answer has a token to learn: give more prompts, or more --num-tokens")
    return texts


def batches(texts: Seq[Conversation], max_tokens: int, generator: torch.Generator | None) -> list[list[int]]:
    """Groups of texts of like lengths, as wide as `max_tokens` allow, padding included.

    Args:
        texts: to be grouped.
        max_tokens: of a group; a longer text is a group of its own.
        generator: of the order of the groups, and of what is grouped among equals; None keeps them sorted.
    """
    lengths = torch.tensor([len(text.token_ids) for text in texts])
    order = torch.arange(len(texts)) if generator is None else torch.randperm(len(texts), generator=generator)
    # Nearly sorted: lengths in steps, at random within a step.
    order = order[torch.sort(lengths[order] // LENGTH_STEP, stable=True).indices]
    groups: list[list[int]] = []
    widest = 0
    for index in order.tolist():
        size = int(lengths[index])
        if groups and max(size, widest) * (len(groups[-1]) + 1) <= max_tokens:
            groups[-1].append(index)
            widest = max(size, widest)
        else:
            groups.append([index])
            widest = size
    if generator is None:
        return groups
    return [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]


def padded(parts: Seq[Tensor]) -> Tensor:
    """[B, T, ...]: parts [n_i, ...] below each other, zeros behind the shorter ones."""
    joined = parts[0].new_zeros(len(parts), max(map(len, parts)), *parts[0].shape[1:])
    for row, part in zip(joined, parts, strict=True):
        row[: len(part)] = part
    return joined
