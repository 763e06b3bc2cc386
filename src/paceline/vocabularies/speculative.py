"""A speculated vocabulary: a cheap ranking of all entries chooses which ones are scored exactly.

"SpecVocab: Speculative Decoding with a Speculative Vocabulary", arXiv 2602.13836: states go through a narrow
layer (D -> D / 8 -> V), the k best entries of that ranking get their exact logits from the frozen output
layer, and all others are out of support for the step. Written from that description; whether the published
ranking has a norm or a nonlinearity between its two matrices is not known, and here it has none.

The ranking is trained on the target's distribution, so its own softmax says how much mass the candidates have
left out; the normaliser is corrected by that.

All states of a beam may share one set of candidates (`shares_candidates`): entries are ranked by the best
that any state gives them, relative to that state's own mass. Each row of the output layer is then read once,
and one top-k serves the whole beam.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.kernels.selection import top_ids
from paceline.vocabularies.base import Candidates, log_sum_exp
from paceline.vocabularies.output_layer import OutputLayer

DEFAULT_NUM_CANDIDATES = 2048
RANKING_FRACTION = 8
"""As published: the ranking is D / 8 wide."""


class VocabularyRanking(nn.Module):
    """Cheap scores of all entries: D -> width -> V, no bias.

    Args:
        hidden_size: D.
        num_entries: V.
        width: of the narrow state; D / 8 by default.
    """

    def __init__(self, hidden_size: int, num_entries: int, width: int | None = None) -> None:
        super().__init__()
        self.width = hidden_size // RANKING_FRACTION if width is None else width
        if self.width < 1:
            raise ConfigError(f"ranking width is {self.width}: it must be at least 1")
        self.down = nn.Linear(hidden_size, self.width, bias=False)
        self.vocabulary = nn.Linear(self.width, num_entries, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[M, D] -> [M, V]."""
        dtype = self.down.weight.dtype
        scores: Tensor = self.vocabulary(self.down(hidden.to(dtype)))
        return scores


class SpeculativeVocabulary:
    """Scores the k entries that a ranking puts first.

    Args:
        layer: the target's whole output layer.
        ranking: of its entries.
        num_candidates: k, changeable at run time.
        shares_candidates: whether all states of a group get the same candidates.
    """

    def __init__(
        self,
        layer: OutputLayer,
        ranking: VocabularyRanking,
        num_candidates: int = DEFAULT_NUM_CANDIDATES,
        *,
        shares_candidates: bool = False,
    ) -> None:
        num_ranked = ranking.vocabulary.out_features
        if num_ranked != layer.num_entries:
            raise ConfigError(
                f"the ranking has {num_ranked} entries, the output layer {layer.num_entries}: they must agree"
            )
        self.layer = layer
        self.ranking = ranking
        self.shares_candidates = shares_candidates
        self.num_candidates = num_candidates

    @property
    def num_entries(self) -> int:
        """V."""
        return self.layer.num_entries

    @property
    def num_candidates(self) -> int:
        """K."""
        return self._num_candidates

    @num_candidates.setter
    def num_candidates(self, value: int) -> None:
        if not 1 <= value <= self.num_entries:
            raise ConfigError(f"num_candidates is {value}: it must be between 1 and {self.num_entries}")
        self._num_candidates = value

    @torch.no_grad()
    def candidates(self, hidden: Tensor, num_groups: int = 1) -> Candidates:
        """[M, D] -> the k best of the ranking, with exact logits, ids ascending; a group shares them."""
        ranked = self.ranking(hidden).float()
        mass = log_sum_exp(ranked)
        if mass.device.type == "cpu" and bool(mass.isnan().any()):
            # A state that is no number must not choose for others, nor upset the selection.
            ranked = ranked.nan_to_num(nan=0.0)
        if not self.shares_candidates:
            ids = top_ids(ranked, self.num_candidates)
            logits = self.layer.logits_of(hidden, ids)
        else:
            best = (ranked - mass.nan_to_num()[:, None]).unflatten(0, (num_groups, -1)).amax(dim=1)
            chosen = top_ids(best, self.num_candidates)
            # One group at a time: every row of the output layer is then read once for all of its states.
            parts = zip(hidden.chunk(num_groups), chosen, strict=True)
            logits = torch.cat([self.layer.logits_of(states, own) for states, own in parts])
            ids = chosen.repeat_interleave(len(hidden) // num_groups, dim=0)
        kept = ranked.gather(1, ids)
        # Log of the share of the ranking's mass that the candidates hold; 0 when they are all entries.
        share = (log_sum_exp(kept) - mass).clamp(max=0.0)
        return Candidates(logits, ids, log_sum_exp(logits) - share)
