"""All entries, by the target's own output layer, frozen and shared."""

from __future__ import annotations

from torch import Tensor

from paceline.kernels.selection import log_sum_exp
from paceline.vocabularies.base import Candidates, Choice
from paceline.vocabularies.output_layer import OutputLayer


class FullVocabulary:
    """Scores every entry.

    Args:
        layer: of the target.
    """

    def __init__(self, layer: OutputLayer) -> None:
        self.layer = layer

    @property
    def num_entries(self) -> int:
        """V."""
        return self.layer.num_entries

    @property
    def num_candidates(self) -> int:
        """All of them."""
        return self.layer.num_entries

    def candidates(
        self,
        hidden: Tensor,
        num_groups: int = 1,  # noqa: ARG002
        choice: Choice | None = None,  # noqa: ARG002
    ) -> Candidates:
        """[M, D] -> all V logits; ids are implicit."""
        logits = self.layer.all_logits(hidden)
        return Candidates(logits, None, log_sum_exp(logits))
