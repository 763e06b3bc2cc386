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
from paceline.kernels.ranking import CompiledRanking, Ranked
from paceline.kernels.selection import log_sum_exp, top_ids
from paceline.vocabularies.base import Candidates, Choice
from paceline.vocabularies.output_layer import OutputLayer

DEFAULT_NUM_CANDIDATES = 2048
RANKING_FRACTION = 8
"""As published: the ranking is D / 8 wide."""


class VocabularyRanking(nn.Module):
    """Cheap scores of all entries: D -> width -> V; the bias, where the output layer has one, is that one's.

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
        return self.scores(self.down(hidden.to(dtype)))

    def scores(self, narrow: Tensor) -> Tensor:
        """What follows the first matrix: [M, width] -> [M, V]; the second one may be of lower precision."""
        found: Tensor = self.vocabulary(narrow.to(self.vocabulary.weight.dtype))
        return found


class SpeculativeVocabulary:
    """Scores the k entries that a ranking puts first.

    Args:
        layer: the target's whole output layer.
        ranking: of its entries; trained, since a CPU packs its weights once.
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
        self._compiled: CompiledRanking | None = None
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
    def candidates(self, hidden: Tensor, num_groups: int = 1, choice: Choice | None = None) -> Candidates:
        """[M, D] -> the k best of the ranking, with exact logits, ids ascending; a group shares them.

        States that are scored with an earlier choice take its share of the mass for theirs.
        """
        groups = num_groups if self.shares_candidates else None
        if choice is not None and groups is not None:
            share = choice.log_share.repeat_interleave(len(hidden) // groups)
            ranked = Ranked(choice.entry_ids, share)
        elif self.num_candidates == self.num_entries:
            ranked = self._all_entries(hidden, groups)
        else:
            narrow = self.ranking.down(hidden.to(self.ranking.down.weight.dtype))
            narrow = _without_strangers(narrow, num_groups)
            if self._compiled is None and CompiledRanking.is_available(self.ranking.vocabulary.weight):
                self._compiled = CompiledRanking(self.ranking.vocabulary.weight, self.layer.scaled_bias)
            ranked = (
                self._ranked_by_torch(narrow, groups)
                if self._compiled is None
                else self._compiled.rank(narrow, self.num_candidates, groups)
            )
        ids = ranked.entry_ids
        if groups is None:
            logits = self.layer.logits_of(hidden, ids)
        else:
            # One group at a time: every row of the output layer is then read once for all of its states.
            parts = zip(hidden.chunk(groups), ids, strict=True)
            logits = torch.cat([self.layer.logits_of(states, own) for states, own in parts])
            choice = Choice(ids, ranked.log_share.view(groups, -1).mean(dim=1))
            ids = ids.repeat_interleave(len(hidden) // groups, dim=0)
        return Candidates(logits, ids, log_sum_exp(logits) - ranked.log_share, choice)

    def _all_entries(self, hidden: Tensor, groups: int | None) -> Ranked:
        """No choice to be made."""
        ids = torch.arange(self.num_entries, device=hidden.device)
        share = torch.zeros(len(hidden), device=hidden.device)
        return Ranked(ids.expand(len(hidden) if groups is None else groups, -1), share)

    def _ranked_by_torch(self, narrow: Tensor, groups: int | None) -> Ranked:
        """What `CompiledRanking.rank` does, for other devices, and to compare with."""
        ranked = self.ranking.scores(narrow).float()
        if self.layer.scaled_bias is not None:
            ranked = ranked + self.layer.scaled_bias
        mass = log_sum_exp(ranked)
        if groups is None:
            ids = every = top_ids(ranked, self.num_candidates)
        else:
            best = (ranked - mass[:, None]).view(groups, -1, ranked.shape[1]).amax(dim=1)
            ids = top_ids(best, self.num_candidates)
            every = ids.repeat_interleave(len(narrow) // groups, dim=0)
        share = (log_sum_exp(ranked.gather(1, every)) - mass).clamp(max=0.0)
        return Ranked(ids, share)


def _without_strangers(narrow: Tensor, num_groups: int) -> Tensor:
    """States that are no numbers take the place of the first good one of their group: they choose for nobody.

    Args:
        narrow: [M, width].
        num_groups: of successive states, as many each; one that has no good state gets zeros.
    """
    is_good = narrow.isfinite().all(dim=-1)
    if narrow.device.type == "cpu" and bool(is_good.all()):
        return narrow
    groups = is_good.view(num_groups, -1)
    size = groups.shape[1]
    # The first good state of each group; without one its first state, which is zeroed below.
    first = groups.int().argmax(dim=1, keepdim=True) + size * torch.arange(
        num_groups, device=narrow.device
    ).unsqueeze(1)
    own = torch.arange(len(narrow), device=narrow.device).view(num_groups, -1)
    return narrow[torch.where(groups, own, first).flatten()].nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
