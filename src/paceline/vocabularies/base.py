"""What a draft head scores its candidates with: all entries, a fixed subset, or one chosen at every step.

The output layer dominates the time of a one-layer drafter, and a subset makes it short. But a softmax over a
subset overstates every candidate, and node values would no longer compare across drafters: so candidates
come with the logarithm of the mass that *all* entries have, as well as the vocabulary knows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.kernels.selection import best_places


@dataclass(frozen=True, slots=True)
class Choice:
    """Entries that were chosen for each of G groups of states.

    Attributes:
        entry_ids: int64 [G, k].
        log_share: fp32 [G], logarithm of the share of all mass that they hold, over the states they were
            chosen by.
    """

    entry_ids: Tensor
    log_share: Tensor


@dataclass(frozen=True, slots=True)
class Candidates:
    """Scored entries of M states.

    Attributes:
        logits: fp32 [M, k].
        entry_ids: int64 [M, k], or [k] where all states share them; None where they are 0 to k - 1.
        log_normalizer: fp32 [M], logarithm of the summed exponentials of the logits of all entries, those
            that were not scored included.
        choice: what was chosen for these states, where they share it: it can be given to the next call.
    """

    logits: Tensor
    entry_ids: Tensor | None
    log_normalizer: Tensor
    choice: Choice | None = None

    @property
    def log_probs(self) -> Tensor:
        """fp32 [M, k]: log-probabilities over all entries; their exponentials sum to at most 1."""
        return self.logits - self.log_normalizer[:, None]

    def ids_at(self, places: Tensor) -> Tensor:
        """Entry ids of places among the candidates: int64 [M, n] -> [M, n]."""
        if self.entry_ids is None:
            return places
        if self.entry_ids.dim() == 1:
            return self.entry_ids[places]
        return self.entry_ids.gather(1, places)

    def best(self, num_entries: int) -> BestEntries:
        """The likeliest entries of each state, the likeliest first."""
        wanted = min(num_entries, self.logits.shape[1])
        logits = self.logits
        if logits.device.type == "cpu" and bool(self.log_normalizer.isnan().any()):
            # A state that is no number names whatever comes first; verification throws it away.
            logits = logits.nan_to_num(nan=-torch.inf)
        places = best_places(logits, wanted)
        # Stable, and places ascend on a CPU: equal logits are settled by the lower id.
        top = logits.gather(1, places).sort(dim=-1, descending=True, stable=True)
        ids = self.ids_at(places.gather(1, top.indices))
        return BestEntries(ids, top.values - self.log_normalizer[:, None])


@dataclass(frozen=True, slots=True)
class BestEntries:
    """The n likeliest entries of M states.

    Attributes:
        entry_ids: int64 [M, n].
        log_probs: fp32 [M, n], falling.
    """

    entry_ids: Tensor
    log_probs: Tensor


class OutputVocabulary(Protocol):
    """Turns the final states of a draft head into scored entries.

    Attributes:
        num_entries: V, entries of the target's vocabulary.
        num_candidates: how many are scored.
    """

    @property
    def num_entries(self) -> int:
        """V."""

    @property
    def num_candidates(self) -> int:
        """Entries that are scored per state."""

    def candidates(self, hidden: Tensor, num_groups: int = 1, choice: Choice | None = None) -> Candidates:
        """Score the states.

        Args:
            hidden: [M, D].
            num_groups: sequences that the states belong to, as many each, one after the other: no state has
                a say in what is scored for another sequence's.
            choice: of the same groups, to be scored again instead of choosing anew; vocabularies that choose
                nothing have none.
        """
