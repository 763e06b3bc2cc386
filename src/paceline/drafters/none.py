"""No drafting: every round is one plain decoding step. The baseline shares the loop with all drafters."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Self

from paceline.drafters.base import refuse_head
from paceline.sequence import Sequence, VerifyResult
from paceline.targets.base import TargetModel, TargetOutput
from paceline.tree import DraftTree


class NoDrafter:
    """Proposes root-only trees."""

    required_features: tuple[int, ...] = ()

    @classmethod
    def build(cls, target: TargetModel, head: Path | None, num_speculative_tokens: int) -> Self:  # noqa: ARG003
        """Make the drafter; there is nothing to load."""
        refuse_head("none", head)
        return cls()

    def propose(self, sequences: Seq[Sequence], max_nodes: int) -> list[DraftTree]:  # noqa: ARG002
        """A root-only tree per sequence."""
        return [DraftTree.root_only(sequence.last_token_id) for sequence in sequences]

    def observe(self, output: TargetOutput, results: Seq[VerifyResult | None]) -> None:
        """Nothing is learnt."""

    def release(self, sequence: Sequence) -> None:
        """Nothing is remembered."""
