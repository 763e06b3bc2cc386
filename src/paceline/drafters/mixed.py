"""Phrases and prompt lookup in one tree.

The two fail in different places: a trained head knows how the target usually goes on, and copying finds
names, numbers and code that only this text has. Each drafts its own tree with its own values; the merged tree
is verified in the same forward, and the node budget takes the most valuable nodes of both.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Self

from paceline.drafters.base import Drafter
from paceline.drafters.phrase import PhraseDrafter
from paceline.drafters.prompt_lookup import PromptLookupDrafter
from paceline.sequence import Sequence, VerifyResult
from paceline.targets.base import TargetModel, TargetOutput
from paceline.tree import DraftTree


class MixedDrafter:
    """Merges what several drafters propose.

    Args:
        parts: the drafters; each sees every round.
    """

    def __init__(self, parts: Seq[Drafter]) -> None:
        self._parts = tuple(parts)
        layers = {layer for part in parts for layer in part.required_features}
        self.required_features: tuple[int, ...] = tuple(sorted(layers))

    @classmethod
    def build(cls, target: TargetModel, head: Path | None, num_speculative_tokens: int) -> Self:
        """Phrases from `head` (by default the one shipped for `target`) and prompt lookup."""
        return cls(
            [
                PhraseDrafter.build(target, head, num_speculative_tokens),
                PromptLookupDrafter.build(target, None, num_speculative_tokens),
            ]
        )

    def propose(self, sequences: Seq[Sequence], max_nodes: int) -> list[DraftTree]:
        """The most valuable nodes of all parts' trees."""
        first, *others = [part.propose(sequences, max_nodes) for part in self._parts]
        for trees in others:
            first = [tree.merged(other) for tree, other in zip(first, trees, strict=True)]
        return [tree.take(max_nodes) for tree in first]

    def observe(self, output: TargetOutput, results: Seq[VerifyResult | None]) -> None:
        """Tell every part."""
        for part in self._parts:
            part.observe(output, results)

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence in every part."""
        for part in self._parts:
            part.release(sequence)
