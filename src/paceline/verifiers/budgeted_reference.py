"""The budgeted rule once more, written to be read: one path at a time, one token at a time.

`budgeted.BudgetedVerifier` is held against this in the tests. For a chain of `value_horizon` tokens it is the
published rule, but for the end of the text, which is the target's alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from collections.abc import Set
from dataclasses import dataclass
from math import isfinite

from paceline.relaxation import Relaxation
from paceline.tree import DraftTree
from paceline.verifiers.budgeted import TOLERANCE


@dataclass(frozen=True, slots=True)
class ScannedPath:
    """What may be kept of one root-to-leaf path.

    Attributes:
        nodes: kept nodes, parents first.
        regret: spent on them.
        num_relaxed: how many of them are not the argmax.
    """

    nodes: tuple[int, ...]
    regret: float
    num_relaxed: int


def scan_path(
    tree: DraftTree,
    path: Seq[int],
    logits: Seq[Seq[float]],
    limits: Relaxation,
    remaining: float,
    eos_token_ids: Set[int] = frozenset(),
) -> list[ScannedPath]:
    """Walk down a path until a token is refused; every stop on the way is a path that may be kept.

    Args:
        tree: the path's.
        path: nodes from below the root down.
        logits: a row for every node of the tree.
        limits: of the request.
        remaining: what is left of its budget.
        eos_token_ids: neither kept in place of the argmax, nor replaced where they are the argmax.
    """
    kept: list[int] = []
    regret, num_relaxed = 0.0, 0
    stops = [ScannedPath((), 0.0, 0)]
    for depth, node in enumerate(path, start=1):
        row = logits[int(tree.parents[node])]
        token_id = int(tree.token_ids[node])
        highest = max(row)
        choice = row.index(highest)
        if token_id != choice:
            own = highest - row[token_id]
            is_possible = isfinite(own) and not {token_id, choice} & eos_token_ids
            value = float(limits.value_horizon - depth + 1)
            if limits.is_value_normalised:
                value /= limits.value_horizon
            is_within_gate = value > 0 and own / value <= limits.max_regret_per_value
            is_within_budget = regret + own <= remaining + TOLERANCE
            is_within_cap = num_relaxed + 1 <= limits.max_relaxed_tokens_per_block
            is_within_limits = is_within_gate and is_within_budget and is_within_cap
            if limits.is_strict or not (is_possible and is_within_limits):
                break
            regret += own
            num_relaxed += 1
        kept.append(node)
        stops.append(ScannedPath(tuple(kept), regret, num_relaxed))
    return stops


def best_path(
    tree: DraftTree,
    logits: Seq[Seq[float]],
    limits: Relaxation,
    remaining: float,
    eos_token_ids: Set[int] = frozenset(),
) -> ScannedPath:
    """Scan every root-to-leaf path.

    Most tokens less the price of the regret win, then least regret, then fewest relaxed tokens, then the
    lowest last node.
    """
    parents = tree.parents.tolist()
    leaves = [node for node in range(len(tree)) if node not in parents]
    scanned: list[ScannedPath] = []
    for leaf in leaves:
        path = []
        node = leaf
        while node > 0:
            path.append(node)
            node = parents[node]
        scanned += scan_path(tree, path[::-1], logits, limits, remaining, eos_token_ids)

    def rank(found: ScannedPath) -> tuple[float, float, int, tuple[int, ...]]:
        worth = len(found.nodes) - limits.regret_price * found.regret
        return -worth, found.regret, found.num_relaxed, found.nodes[-1:]

    return min(scanned, key=rank)
