"""What a phrase head computes in a step of training, in one forward: replicas on several devices need it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.heads.phrase import PhraseHead
from paceline.training.soft_cross_entropy import soft_cross_entropy


@dataclass(frozen=True, slots=True)
class PhraseScores:
    """Scores of M positions.

    Attributes:
        phrases: [M, E].
        chained: [M, chain_entries + 1], behind the given phrases; None where none are given.
        ranking_loss: mean cross-entropy of the ranking with the head's own distribution, with no gradient for
            the layers in front of it; 0 without a ranking, or where nothing learns.
    """

    phrases: Tensor
    chained: Tensor | None
    ranking_loss: Tensor


class PhraseLearner(nn.Module):
    """A head on its way through training.

    Args:
        head: trained in place.
    """

    def __init__(self, head: PhraseHead) -> None:
        super().__init__()
        self.head = head

    def forward(
        self, inputs: Tensor, last_embedding: Tensor | None = None, mean_embedding: Tensor | None = None
    ) -> PhraseScores:
        """Everything that a loss reads.

        Args:
            inputs: [M, num_inputs * D].
            last_embedding: see `PhraseHead.chained_scores`.
            mean_embedding: likewise.
        """
        head = self.head
        state = head.trunk(inputs)
        chained = None
        if last_embedding is not None and mean_embedding is not None:
            chained = head.chained_scores(state, last_embedding, mean_embedding)
        phrases = head.phrase_scores(state)
        return PhraseScores(phrases, chained, self._ranking_loss(state.detach(), phrases.detach()))

    def _ranking_loss(self, state: Tensor, scores: Tensor) -> Tensor:
        """Chunk by chunk: more tables of scores as wide as the vocabulary would not fit beside the first."""
        head = self.head
        if head.ranking is None or not torch.is_grad_enabled():
            return state.new_zeros(())
        summed = soft_cross_entropy(
            head.ranking.down(state),
            head.ranking.vocabulary.weight,
            scores.contiguous(),
            bias=head.output.bias.detach(),
            dtype=scores.dtype,
        )
        # Of an empty share of a batch too: all replicas must have gradients of the same parameters.
        return summed / max(len(state), 1)
