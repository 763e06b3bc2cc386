"""A fixed subset of the entries: by frequency in a corpus, in the target's own text, or as trained.

FR-Spec (arXiv 2502.14856) counts tokens in a corpus, VocabTrim (arXiv 2506.22694) in text that the target
wrote, EAGLE-3 (arXiv 2503.01840) trains its head on a subset from the start. All three are rows of one table
and a map between their numbers and the target's ids; public checkpoints write that map as `d2t`, *offsets*
from the number in the subset to the id, and `t2d`, a mask over the target's vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import CheckpointError, ConfigError
from paceline.kernels.selection import log_sum_exp
from paceline.vocabularies.base import Candidates, Choice
from paceline.vocabularies.output_layer import OutputLayer


@dataclass(frozen=True, slots=True)
class FrequentIds:
    """A subset chosen by frequency.

    Attributes:
        entry_ids: int64 [S], ascending.
        coverage: share of all counted tokens that it holds.
    """

    entry_ids: Tensor
    coverage: float


class StaticVocabulary:
    """Scores S fixed entries out of V.

    Args:
        layer: of these S entries, in the order of `entry_ids`.
        entry_ids: int64 [S], ascending ids in the target's vocabulary.
        num_entries: V.
        coverage: share of the target's tokens that the subset holds, in (0, 1]: what a softmax over the
            subset overstates its candidates by, on average.
    """

    def __init__(
        self, layer: OutputLayer, entry_ids: Tensor, num_entries: int, coverage: float = 1.0
    ) -> None:
        if layer.num_entries != len(entry_ids) or not len(entry_ids):
            raise CheckpointError(
                f"static vocabulary: {layer.num_entries} rows for {len(entry_ids)} ids: give one row an id"
            )
        if int(entry_ids[0]) < 0 or int(entry_ids[-1]) >= num_entries or bool((entry_ids.diff() <= 0).any()):
            raise CheckpointError(
                f"static vocabulary: ids {int(entry_ids[0])} to {int(entry_ids[-1])}: they must be ascending "
                f"and in [0, {num_entries})"
            )
        if not 0 < coverage <= 1:
            raise ConfigError(f"static vocabulary: coverage is {coverage}: it must be above 0 and at most 1")
        self.layer = layer
        self.entry_ids = entry_ids.to(layer.weight.device)
        self.coverage = coverage
        self._num_entries = num_entries

    @classmethod
    def of_rows(cls, layer: OutputLayer, entry_ids: Tensor, coverage: float = 1.0) -> StaticVocabulary:
        """Rows of a full output layer: what FR-Spec and VocabTrim take from the target."""
        return cls(layer.rows(entry_ids.to(layer.weight.device)), entry_ids, layer.num_entries, coverage)

    @property
    def num_entries(self) -> int:
        """V."""
        return self._num_entries

    @property
    def num_candidates(self) -> int:
        """S."""
        return len(self.entry_ids)

    @property
    def d2t(self) -> Tensor:
        """int64 [S]: offset from an entry's number in the subset to its id."""
        return self.entry_ids - torch.arange(len(self.entry_ids), device=self.entry_ids.device)

    @property
    def t2d(self) -> Tensor:
        """Bool [V]: which ids are in the subset."""
        mask = torch.zeros(self.num_entries, dtype=torch.bool, device=self.entry_ids.device)
        mask[self.entry_ids] = True
        return mask

    def candidates(
        self,
        hidden: Tensor,
        num_groups: int = 1,  # noqa: ARG002
        choice: Choice | None = None,  # noqa: ARG002
    ) -> Candidates:
        """[M, D] -> S logits, ids shared by all states."""
        logits = self.layer.all_logits(hidden)
        return Candidates(logits, self.entry_ids, log_sum_exp(logits) - math.log(self.coverage))


def ids_from_offsets(d2t: Tensor, num_entries: int) -> Tensor:
    """Target ids of the entries of a public checkpoint.

    Args:
        d2t: int64 [S], offsets: the id is the entry's number plus its offset.
        num_entries: V.

    Raises:
        CheckpointError: ids are not ascending or not in [0, V).
    """
    ids = torch.arange(len(d2t), device=d2t.device) + d2t.long()
    if not len(ids) or int(ids[0]) < 0 or int(ids[-1]) >= num_entries or bool((ids.diff() <= 0).any()):
        raise CheckpointError(
            f"d2t maps {len(ids)} entries to ids up to {int(ids.max()) if len(ids) else None}: it must hold "
            f"offsets (id minus number) that give ascending ids in [0, {num_entries})"
        )
    return ids


def frequent_ids(counts: Tensor, num_ids: int, forced: Iterable[int] = ()) -> FrequentIds:
    """The most frequent ids, ascending.

    Args:
        counts: [V], how often each id occurred; of equal ones the lower id is taken first.
        num_ids: S, as published 32,000.
        forced: ids that are in whatever their count, such as those that end a text.

    Raises:
        ConfigError: more are asked for than there are, or forced, or no id was counted at all.
    """
    wanted = sorted(set(forced))
    if not len(wanted) <= num_ids <= len(counts) or num_ids < 1:
        raise ConfigError(
            f"a vocabulary of {num_ids} entries: it must hold at least the {len(wanted)} forced ones and at "
            f"most all {len(counts)}"
        )
    total = float(counts.sum())
    if not total > 0:
        raise ConfigError("no token was counted: give text to count tokens in")
    ranked = counts.double()
    ranked[wanted] = math.inf
    order = ranked.sort(descending=True, stable=True).indices
    ids = order[:num_ids].sort().values
    return FrequentIds(ids, float(counts[ids].sum()) / total)
