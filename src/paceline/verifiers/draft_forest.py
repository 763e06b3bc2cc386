"""All draft trees of a batch as flat arrays, and the best path of each under a rule that refuses nodes.

A lossy verifier decides for every node whether it may be kept provided that everything above it is. What is
kept of a tree is then, of the paths without a refused node, the one that is worth most (its tokens, unless
the rule says otherwise), then the one with least regret, then the one with fewest relaxed tokens (equal
logits cost nothing, and the argmax is as good), then the one of the lowest node. All of it is array code;
nothing runs node by node but the climb along the chosen path.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.tree import DraftTree

Reals = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Paths:
    """What is known of the path down to each of R nodes.

    Attributes:
        depths: float64 [R], 0 for roots.
        regrets: float64 [R], summed over the nodes that are not the target's choice.
        num_relaxed: float64 [R], how many those are.
    """

    depths: Reals
    regrets: Reals
    num_relaxed: Reals


@dataclass(frozen=True, slots=True)
class DraftForest:
    """R nodes of B trees, numbered by row.

    Attributes:
        token_ids: int64 [R].
        parents: int64 [R], rows; a root is its own.
        owners: int64 [R], number of the tree.
        roots: int64 [B], rows.
        slices: rows of each tree.
        climbs: int64 [R] each: the node 1, 2, 4 ... edges above every node, until all are roots.
    """

    token_ids: NDArray[np.int64]
    parents: NDArray[np.int64]
    owners: NDArray[np.int64]
    roots: NDArray[np.int64]
    slices: tuple[slice, ...]
    climbs: tuple[NDArray[np.int64], ...]

    def __len__(self) -> int:
        """Number of nodes, roots included."""
        return len(self.token_ids)

    @classmethod
    def of(cls, trees: Seq[DraftTree], starts: Seq[int]) -> DraftForest:
        """Join trees whose first rows are `starts`."""
        parents = np.concatenate([tree.parents.numpy() + start for tree, start in zip(trees, starts)])
        roots = np.asarray(starts, dtype=np.int64)
        parents[roots] = roots
        lengths = [len(tree) for tree in trees]
        return cls(
            np.concatenate([tree.token_ids.numpy() for tree in trees]),
            parents,
            np.repeat(np.arange(len(trees)), lengths),
            roots,
            tuple(slice(start, start + length) for start, length in zip(starts, lengths)),
            _climbs(parents),
        )

    def path_sums(self, amounts: Reals) -> Reals:
        """Sum over each node and everything above it.

        Args:
            amounts: [C, R], 0 for roots.

        Returns:
            [C, R].
        """
        sums = amounts.copy()
        # Every pass doubles the part of the path that a sum covers; roots add nothing however often.
        for above in self.climbs:
            sums += sums[:, above]
        return sums

    def best_ends(self, may_keep: Flags, paths: Paths, worth: Reals | None = None) -> NDArray[np.int64]:
        """Row at which the best path of every tree ends.

        Args:
            may_keep: [R], whether the node may be kept provided that everything above it is; true for roots.
            paths: down to each node.
            worth: [R], of the path down to each node; its tokens by default.

        Returns:
            int64 [B].
        """
        is_cut = self.path_sums((~may_keep)[None].astype(np.float64))[0]
        rows = np.flatnonzero(is_cut == 0)
        best = paths.depths if worth is None else worth
        keys = (paths.num_relaxed[rows], paths.regrets[rows], -best[rows])
        if len(self.roots) == 1:
            return rows[np.lexsort(keys)[:1]]
        owners = self.owners[rows]
        order = np.lexsort((*keys, owners))
        return rows[order[np.searchsorted(owners[order], np.arange(len(self.roots)))]]

    def least_regret_children(self, rows: NDArray[np.int64], regrets: Reals) -> NDArray[np.int64]:
        """Child of least regret of one row of every tree: int64 [B] -> [B], -1 for leaves."""
        is_child = rows[self.owners] == self.parents
        is_child[self.roots] = False
        children = np.flatnonzero(is_child)
        found = np.full(len(rows), -1, dtype=np.int64)
        # Written from the worst to the best, so that the best one stays.
        order = children[np.lexsort((children, regrets[children]))][::-1]
        found[self.owners[order]] = order
        return found

    def path(self, end: int) -> list[int]:
        """Rows from below the root down to `end`."""
        rows = []
        while self.parents[end] != end:
            rows.append(end)
            end = int(self.parents[end])
        return rows[::-1]


def _climbs(parents: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
    """Nodes 1, 2, 4 ... edges above each of R nodes; one more step would change nothing."""
    climbs = [parents]
    while True:
        above = climbs[-1]
        higher = above[above]
        if (higher == above).all():
            return tuple(climbs)
        climbs.append(higher)
