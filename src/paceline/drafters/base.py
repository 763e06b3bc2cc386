"""The contract of a drafter: propose draft trees, watch what became of them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Protocol, Self

from paceline.errors import ConfigError
from paceline.sequence import Sequence, VerifyResult
from paceline.targets.base import TargetModel, TargetOutput
from paceline.tree import DraftTree


class DraftProposer(Protocol):
    """What the engine asks of a drafter. A root-only tree is always a legal answer."""

    @property
    def required_features(self) -> tuple[int, ...]:
        """Layers of the target whose inputs `observe` reads."""

    def propose(self, sequences: Seq[Sequence], max_nodes: int) -> list[DraftTree]:
        """One tree per sequence, rooted at its newest token, of at most `max_nodes` drafted nodes."""

    def observe(self, output: TargetOutput, results: Seq[VerifyResult | None]) -> None:
        """Watch a forward and what was kept of it.

        Args:
            output: the forward, one segment per sequence.
            results: what each sequence accepted, trimmed and already added to it; None for a prompt chunk.
        """

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence; unknown ones are fine."""


class Drafter(DraftProposer, Protocol):
    """Guesses how sequences go on, and can be asked for by name."""

    @classmethod
    def build(cls, target: TargetModel, head: Path | None, num_speculative_tokens: int) -> Self:
        """Make a drafter for `target`.

        Args:
            target: the model that will verify.
            head: folder of a trained draft head; drafters without one refuse it.
            num_speculative_tokens: most nodes that will be asked for in a round.
        """


def refuse_head(drafter: str, head: Path | None) -> None:
    """Raise ConfigError when a head is given to a drafter that has none."""
    if head is not None:
        raise ConfigError(
            f"drafter {drafter!r} has no trained head, but head {str(head)!r} was given: "
            "drop it, or use drafter 'phrase'"
        )
