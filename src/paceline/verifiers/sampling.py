"""Lossless sampling: draw the target's token at every visited node, then follow the child that carries it.

Drafts are point masses, so speculative sampling (arXiv 2211.17192, 2302.01318) reduces to this: with p the
target's law at a node, a drafted child x is kept with probability p(x), and what is emitted otherwise follows
p without x. Each node draws once, whatever the number of its children, so the emitted tokens follow the
target exactly.

The draw uses one uniform number keyed by (seed, absolute position) and the inverse distribution function in
the order of token ids. Therefore the text of a seed does not depend on the drafter, the tree or the batch.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paceline.errors import UnsupportedFeatureError
from paceline.sequence import Sequence, VerifyResult
from paceline.tree import DraftTree
from paceline.verifiers.base import tree_starts
from paceline.verifiers.filters import FilterParameters, filtered_weights, is_asking_free
from paceline.verifiers.keyed_random import keyed_uniforms


class SamplingVerifier:
    """Draws the target's token level by level, for all sequences at once."""

    lossless: ClassVar[bool] = True

    def check(self, sequence: Sequence) -> None:
        """Refuse temperature 0, which has no law to draw from."""
        if sequence.parameters.is_greedy:
            raise UnsupportedFeatureError(
                "verifier 'sampling' cannot serve temperature 0: use a temperature above 0, or verifier "
                "'greedy'"
            )

    def verify(self, trees: Seq[DraftTree], logits: Tensor, sequences: Seq[Sequence]) -> list[VerifyResult]:
        """Follow, in each tree, the tokens drawn from the target's filtered law."""
        starts = tree_starts(trees, logits)
        if not trees:
            return []
        if logits.device.type == "mps":
            logits = logits.cpu()  # float64, which the draws need, does not exist there
        forest = _Forest.of(trees, starts, logits.device)
        parameters = FilterParameters.of([s.parameters for s in sequences], logits.device)
        num_levels = max(int(tree.depths.max()) for tree in trees) + 1
        uniforms = torch.tensor(
            [keyed_uniforms(s.seed, len(s), num_levels) for s in sequences], dtype=torch.float64
        ).to(logits.device)  # [B, K + 1]
        visits = _walk(forest, logits, parameters, uniforms).tolist()  # the one synchronisation
        return [_result(rows, drawn, start) for (rows, drawn), start in zip(visits, starts, strict=True)]

    def release(self, sequence: Sequence) -> None:
        """Nothing is remembered between rounds."""


@dataclass(frozen=True, slots=True)
class _Forest:
    """All trees of a batch on the device of the logits, nodes numbered by row.

    Attributes:
        token_ids: int64 [R].
        parents: int64 [R], rows; -1 for roots.
        owners: int64 [R], number of the sequence.
        roots: int64 [B], rows.
    """

    token_ids: Tensor
    parents: Tensor
    owners: Tensor
    roots: Tensor

    @classmethod
    def of(cls, trees: Seq[DraftTree], starts: list[int], device: torch.device) -> _Forest:
        """Join trees whose first rows are `starts`."""
        roots = torch.tensor(starts)
        owners = torch.repeat_interleave(torch.tensor([len(tree) for tree in trees]))
        parents = torch.cat([tree.parents for tree in trees])
        parents = torch.where(parents < 0, -1, parents + roots[owners])
        token_ids = torch.cat([tree.token_ids for tree in trees])
        packed = torch.stack([token_ids, parents, owners]).to(device)
        return cls(packed[0], packed[1], packed[2], roots.to(device))

    def children(self, rows: Tensor, token_ids: Tensor) -> Tensor:
        """Row of the child of each row [B] that carries the token [B]; -1 where there is none."""
        is_child = (self.parents == rows[self.owners]) & (self.token_ids == token_ids[self.owners])
        candidates = torch.where(is_child, torch.arange(is_child.shape[0], device=rows.device), -1)
        return torch.full_like(rows, -1).scatter_reduce_(0, self.owners, candidates, "amax")


def _walk(forest: _Forest, logits: Tensor, parameters: FilterParameters, uniforms: Tensor) -> Tensor:
    """Draw at the root of every tree, then at the child that carries the drawn token, and so on.

    Returns:
        int64 [B, 2, K + 1]: rows visited and the tokens drawn there; -1 after the end of a walk.
    """
    may_ask = is_asking_free(logits.device)
    everyone = torch.arange(forest.roots.shape[0], device=logits.device)
    rows = forest.roots  # [B], -1 once the walk of a sequence has ended
    levels: list[Tensor] = []
    for level in range(uniforms.shape[1]):
        # Where it is not free it is cheaper to draw for walks that have ended than to ask which ones have.
        walking = torch.nonzero(rows >= 0)[:, 0] if may_ask else everyone
        if walking.shape[0] == 0:
            break
        weights = filtered_weights(logits[rows[walking].clamp(min=0)], parameters.of_rows(walking))
        drawn = torch.full_like(rows, -1)
        drawn[walking] = _draw(weights, uniforms[walking, level])
        drawn = torch.where(rows >= 0, drawn, -1)
        levels.append(torch.stack([rows, drawn], dim=1))
        rows = forest.children(rows, drawn)
    return torch.stack(levels, dim=2)


def _draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Token at the quantile of each row of weights [A, V]; 0, as argmax gives, where all are banned."""
    cumulative = weights.cumsum(dim=1, dtype=torch.float64)
    total = cumulative[:, -1]
    token_ids = torch.searchsorted(cumulative, (uniforms * total)[:, None], right=True)[:, 0]
    return torch.where(total > 0, token_ids, 0)


def _result(rows: list[int], drawn: list[int], start: int) -> VerifyResult:
    """Result of one walk that began at row `start`."""
    path = tuple(row - start for row in rows[1:] if row >= 0)
    return VerifyResult(path, tuple(drawn[: len(path)]), drawn[len(path)])
