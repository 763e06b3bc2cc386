"""Temperature, top-k, top-p and min-p, with Hugging Face's order and meaning, row by row.

A row's outcome depends on its own logits and parameters only, never on the rows beside it. Filters are
thresholds on the scores, in token order: the whole vocabulary is sorted only where the nucleus of top-p is
unusually wide.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.sampling import SamplingParameters

BANNED = float("-inf")
NARROW_WIDTH = 512


@dataclass(frozen=True, slots=True)
class FilterParameters:
    """Parameters of B rows, one entry a row, and what the widest filter of the batch is.

    Attributes:
        temperature: float32 [B].
        top_k: int64 [B], 0 keeps all.
        top_p: float64 [B], 1 keeps all.
        min_p: float32 [B], 0 keeps all.
        max_top_k: largest `top_k`, known without asking the device.
        has_top_p: whether any row uses top-p.
        has_min_p: whether any row uses min-p.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    max_top_k: int
    has_top_p: bool
    has_min_p: bool

    @classmethod
    def of(cls, parameters: Seq[SamplingParameters], device: torch.device) -> FilterParameters:
        """Parameters of a batch, on `device`."""
        top_k = [p.top_k for p in parameters]
        top_p = [p.top_p for p in parameters]
        min_p = [p.min_p for p in parameters]
        return cls(
            torch.tensor([p.temperature for p in parameters], dtype=torch.float32).to(device),
            torch.tensor(top_k).to(device),
            torch.tensor(top_p, dtype=torch.float64).to(device),
            torch.tensor(min_p, dtype=torch.float32).to(device),
            max(top_k),
            min(top_p) < 1,
            max(min_p) > 0,
        )

    def of_rows(self, rows: Tensor) -> FilterParameters:
        """Parameters of some rows: int64 [A]."""
        return FilterParameters(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.max_top_k,
            self.has_top_p,
            self.has_min_p,
        )


def is_asking_free(device: torch.device) -> bool:
    """Whether the program may look at values on the device without waiting for it."""
    return device.type == "cpu"


def filtered_weights(logits: Tensor, parameters: FilterParameters) -> Tensor:
    """Probabilities up to a factor a row.

    Args:
        logits: [A, V]; not modified.
        parameters: of these rows.

    Returns:
        float32 [A, V], 0 for tokens that are filtered out; 1 for the likeliest. A row without any possible
        token is 0.
    """
    logits = logits.to(torch.float32)
    highest = logits.amax(dim=1, keepdim=True)
    # The largest score is 0 then, which no temperature can make overflow.
    scores = (logits - highest.masked_fill(highest == BANNED, 0)) / parameters.temperature[:, None]
    if parameters.max_top_k or parameters.has_top_p:
        scores.masked_fill_(_is_filtered_out(scores, parameters), BANNED)
    weights = scores.exp_()
    if parameters.has_min_p:
        weights.masked_fill_(weights < parameters.min_p[:, None], 0)
    return weights


@dataclass(frozen=True, slots=True)
class _Border:
    """Where the kept scores of each row end.

    Attributes:
        lowest: float32 [A], lowest kept score.
        num_tied: int64 [A], how many scores equal to it are kept.
        is_certain: bool [A], false where the best scores that were looked at do not settle it.
    """

    lowest: Tensor
    num_tied: Tensor
    is_certain: Tensor


def _is_filtered_out(scores: Tensor, parameters: FilterParameters) -> Tensor:
    """Mask [A, V] of what top-k and then top-p remove.

    Scores equal to the k-th best all stay, as in Hugging Face. Of those at the border of the nucleus as many
    stay as in Hugging Face, where sorting decides which; here the lowest ids do.
    """
    vocab_size = scores.shape[1]
    # Where asking "was that enough" is not free, sorting is cheap.
    width = vocab_size
    if is_asking_free(scores.device):
        width = min(max(NARROW_WIDTH, 2 * parameters.max_top_k), vocab_size)
    border = _find_border(scores, parameters, width)
    if width < vocab_size:
        open_rows = torch.nonzero(~border.is_certain)[:, 0]
        if open_rows.shape[0]:
            wide = _find_border(scores[open_rows], parameters.of_rows(open_rows), vocab_size)
            border.lowest[open_rows] = wide.lowest
            border.num_tied[open_rows] = wide.num_tied
    lowest = border.lowest[:, None]
    is_tied = scores == lowest
    return (scores < lowest) | (is_tied & (is_tied.cumsum(dim=1) > border.num_tied[:, None]))


def _find_border(scores: Tensor, parameters: FilterParameters, width: int) -> _Border:
    """Border of each row [A, V] from its best `width` scores."""
    top_k, top_p = parameters.top_k, parameters.top_p
    has_top_k, has_top_p = top_k > 0, top_p < 1
    best = scores.topk(width, dim=1).values  # [A, width], best first
    last_of_top_k = best.gather(1, (top_k - 1).clamp(0, width - 1)[:, None])
    best = best.masked_fill((best < last_of_top_k) & has_top_k[:, None], BANNED)
    weights = best.exp().to(torch.float64)
    total = weights.sum(dim=1)
    if parameters.has_top_p:
        total = torch.where(has_top_k, total, scores.exp().sum(dim=1, dtype=torch.float64))
    # A token is in the nucleus when the weight of the better ones does not reach top_p.
    is_inside = weights.cumsum(dim=1) - weights < (total * top_p)[:, None]
    is_kept = (is_inside | ~has_top_p[:, None]) & (best > BANNED)
    num_kept = is_kept.sum(dim=1).clamp(min=1)
    lowest = best.gather(1, num_kept[:, None] - 1)
    num_tied = num_kept - (best > lowest).sum(dim=1)
    lowest = lowest[:, 0]
    # Top-k is settled once a worse score was seen, the nucleus once a score below its lowest was.
    is_certain = torch.where(has_top_k, best[:, -1] == BANNED, best[:, -1] < lowest)
    is_unfiltered = ~(has_top_k | has_top_p)
    return _Border(
        lowest.masked_fill(is_unfiltered, BANNED),
        num_tied.masked_fill(is_unfiltered, scores.shape[1]),
        is_certain | is_unfiltered,
    )
