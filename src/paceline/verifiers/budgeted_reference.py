"""The budgeted rule once more, written to be read: one path at a time, one token at a time.

`budgeted.BudgetedVerifier` is held against this in the tests, and with one chain for a tree it is the
published rule word for word.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from paceline.relaxation import Relaxation
from paceline.tree import DraftTree
from paceline.verifiers.budgeted import TOLERANCE


@dataclass(frozen=True, slots=True)
class ScannedPath:
    """What is kept of one root-to-leaf path.

    Attributes:
        nodes: kept nodes, parents first.
        regret: spent on them.
    """

    nodes: tuple[int, ...]
    regret: float


def scan_path(
    tree: DraftTree, path: Seq[int], logits: Seq[Seq[float]], limits: Relaxation, remaining: float
) -> ScannedPath:
    """Walk down a path until a token is refused.

    Args:
        tree: the path's.
        path: nodes from below the root down.
        logits: a row for every node of the tree.
        limits: of the request.
        remaining: what is left of its budget.
    """
    kept: list[int] = []
    regret, num_relaxed = 0.0, 0
    for depth, node in enumerate(path, start=1):
        row = logits[int(tree.parents[node])]
        token_id = int(tree.token_ids[node])
        highest = max(row)
        if token_id != row.index(highest):
            own = highest - row[token_id]
            value = float(limits.value_horizon - depth + 1)
            if limits.is_value_normalised:
                value /= limits.value_horizon
            is_within_gate = value > 0 and own / value <= limits.max_regret_per_value
            is_within_budget = regret + own <= remaining + TOLERANCE
            is_within_cap = num_relaxed + 1 <= limits.max_relaxed_tokens_per_block
            if limits.is_strict or not (is_within_gate and is_within_budget and is_within_cap):
                break
            regret += own
            num_relaxed += 1
        kept.append(node)
    return ScannedPath(tuple(kept), regret)


def best_path(tree: DraftTree, logits: Seq[Seq[float]], limits: Relaxation, remaining: float) -> ScannedPath:
    """Scan every root-to-leaf path; most tokens win, then least regret, then the lowest last node."""
    parents = tree.parents.tolist()
    leaves = [node for node in range(len(tree)) if node not in parents]
    scanned = []
    for leaf in leaves:
        path = []
        node = leaf
        while node > 0:
            path.append(node)
            node = parents[node]
        scanned.append(scan_path(tree, path[::-1], logits, limits, remaining))
    return min(scanned, key=lambda found: (-len(found.nodes), found.regret, found.nodes[-1:]))
