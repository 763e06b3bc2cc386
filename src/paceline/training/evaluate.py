"""Tokens per round from recorded answers alone, and whether the head's values can be believed.

At every row of a held-out answer the head's draft tree of B nodes is compared with what the target wrote:
the depth that the text reaches inside the tree is what verification would accept. A round then jumps over
the accepted tokens and the target's own token, as the engine does, so the figure is the engine's, without
running the target.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.training.samples import Samples, answer_rows
from paceline.tree import DraftTree
from paceline.vocabularies.trie import TIE, TokenTrie

WIDTHS = (8, 16, 24, 32, 48, 64)
NUM_BINS = 10
_ROWS_PER_CHUNK = 512


@dataclass(frozen=True, slots=True)
class CalibrationBin:
    """Drafted nodes whose value lies in one interval.

    Attributes:
        mean_value: what the head said.
        accepted_fraction: how often the text agreed.
        num_nodes: how many.
    """

    mean_value: float
    accepted_fraction: float
    num_nodes: int


@dataclass(frozen=True, slots=True)
class HeadEvaluation:
    """Offline figures of a head.

    Attributes:
        tokens_per_round: by number of drafted nodes; the target's own token included.
        expected_per_round: 1 + the mean sum of the values of the drafted nodes, by number of nodes: what the
            head
            itself expects.
        calibration: nodes of the widest trees by value, in `NUM_BINS` equal intervals (empty ones left out).
        num_tokens: tokens evaluated.
        num_rounds: by number of drafted nodes.
    """

    tokens_per_round: dict[int, float]
    expected_per_round: dict[int, float]
    calibration: tuple[CalibrationBin, ...]
    num_tokens: int
    num_rounds: dict[int, int]


@dataclass(frozen=True, slots=True)
class _Walk:
    """The comparison of one chunk of M rows.

    Attributes:
        depths: int64 [M, W], accepted tokens for each width.
        sums: float64 [M, W], sum of the values of the drafted nodes.
        bin_counts: float64 [3, NUM_BINS]: nodes, sum of values, accepted nodes.
    """

    depths: Tensor
    sums: Tensor
    bin_counts: Tensor


def evaluate_head(
    scores_of: Callable[[Tensor], Tensor],
    samples: Samples,
    trie: TokenTrie,
    widths: Seq[int] = WIDTHS,
    *,
    max_rows: int | None = None,
) -> HeadEvaluation:
    """Compare a head's draft trees with recorded answers.

    Args:
        scores_of: rows of `samples` [M] -> scores [M, E] on the CPU.
        samples: held-out answers.
        trie: of the vocabulary.
        widths: numbers of drafted nodes.
        max_rows: stop after the answer that reaches this row; None takes all.
    """

    def walk(rows: Tensor) -> _Walk:
        probabilities = torch.softmax(scores_of(rows).float(), dim=-1)
        return _walk(probabilities, samples.nodes[rows], trie, widths)

    return _evaluate(walk, samples, widths, max_rows)


def evaluate_trees(
    trees_of: Callable[[Tensor, int], list[DraftTree]],
    samples: Samples,
    widths: Seq[int] = WIDTHS,
    *,
    max_rows: int | None = None,
) -> HeadEvaluation:
    """The same for any draft trees.

    Args:
        trees_of: rows of `samples` [M] and a number of nodes -> their draft trees.
        samples: held-out answers.
        widths: numbers of drafted nodes.
        max_rows: stop after the answer that reaches this row; None takes all.
    """
    ends = torch.cat([torch.full((len(rows),), rows.stop) for rows in answer_rows(samples)])

    def walk(rows: Tensor) -> _Walk:
        texts = [samples.output_ids[row : ends[row]].tolist() for row in rows.tolist()]
        return _walk_trees(trees_of(rows, max(widths)), texts, widths)

    return _evaluate(walk, samples, widths, max_rows)


def _evaluate(
    walk: Callable[[Tensor], _Walk], samples: Samples, widths: Seq[int], max_rows: int | None
) -> HeadEvaluation:
    """Figures over all answers from the comparison of their rows."""
    answers = list(answer_rows(samples))
    if max_rows is not None:
        answers = [answer for answer in answers if answer.start < max_rows]
    num_rows = answers[-1].stop
    walks = [
        walk(torch.arange(start, min(start + _ROWS_PER_CHUNK, num_rows)))
        for start in range(0, num_rows, _ROWS_PER_CHUNK)
    ]
    depths = torch.cat([walk.depths for walk in walks])
    sums = torch.cat([walk.sums for walk in walks])
    bins = torch.stack([walk.bin_counts for walk in walks]).sum(0)
    num_rounds = dict.fromkeys(widths, 0)
    for answer in answers:
        for column, width in enumerate(widths):
            num_rounds[width] += count_rounds(depths[answer.start : answer.stop, column].tolist())
    return HeadEvaluation(
        tokens_per_round={width: num_rows / num_rounds[width] for width in widths},
        expected_per_round={width: 1.0 + float(sums[:, i].mean()) for i, width in enumerate(widths)},
        calibration=tuple(
            CalibrationBin(float(total / count), float(accepted / count), int(count))
            for count, total, accepted in bins.T.tolist()
            if count
        ),
        num_tokens=num_rows,
        num_rounds=num_rounds,
    )


def count_rounds(depths: Seq[int]) -> int:
    """Rounds that an answer takes when row t's tree accepts `depths[t]` tokens.

    The first round comes with the prompt, before any state is known, and yields the target's own token.
    """
    position, num_rounds = 1, 1
    while position < len(depths):
        position += depths[position] + 1
        num_rounds += 1
    return num_rounds


def _walk(probabilities: Tensor, nodes: Tensor, trie: TokenTrie, widths: Seq[int]) -> _Walk:
    """Draft trees of M rows against the deepest node that the text reaches."""
    mass = trie.node_mass(probabilities)  # [M, T]
    # Ties go to the shallower node, as in the drafter.
    ranked = mass * (1.0 - TIE * trie.depths.to(torch.float64))
    best = torch.topk(ranked, min(max(widths), len(trie)), dim=1)
    kept = [min(width, len(trie)) for width in widths]
    borders = best.values[:, [k - 1 for k in kept]]  # [M, W]
    values = mass.gather(1, best.indices)
    depths = torch.zeros(len(nodes), len(widths), dtype=torch.int64)
    on_path = torch.zeros_like(best.indices, dtype=torch.bool)
    current, rows = nodes, torch.arange(len(nodes))
    while rows.numel():
        rows, current = rows[current >= 0], current[current >= 0]
        if not rows.numel():
            break
        depths[rows] += ranked[rows, current][:, None] >= borders[rows]
        on_path[rows] |= best.indices[rows] == current[:, None]
        current = trie.parents[current]
    sums = values.cumsum(1)[:, [k - 1 for k in kept]]
    return _Walk(depths, sums, _binned(values.flatten(), on_path.flatten()))


def _walk_trees(trees: Seq[DraftTree], texts: Seq[Seq[int]], widths: Seq[int]) -> _Walk:
    """Draft trees of M rows against the text behind each; a narrower tree has the most valuable nodes."""
    depths = torch.zeros(len(trees), len(widths), dtype=torch.int64)
    sums = torch.zeros(len(trees), len(widths), dtype=torch.float64)
    on_path = []
    for row, (tree, text) in enumerate(zip(trees, texts, strict=True)):
        values = tree.node_values[1:].double()
        best = values.sort(descending=True, stable=True)
        ranks = best.indices.argsort().tolist()
        children = {
            edge: node for node, edge in enumerate(zip(tree.parents.tolist(), tree.token_ids.tolist()))
        }
        is_on_path = torch.zeros(len(values), dtype=torch.bool)
        node, needed = 0, 0
        for token in text:
            node = children.get((node, token), 0)
            if not node:
                break
            is_on_path[node - 1] = True
            needed = max(needed, ranks[node - 1] + 1)
            for column, width in enumerate(widths):
                depths[row, column] += needed <= width
        on_path.append(is_on_path)
        running = best.values.cumsum(0)
        if len(values):
            sums[row] = running[[min(width, len(values)) - 1 for width in widths]]
    values = torch.cat([tree.node_values[1:].double() for tree in trees])
    return _Walk(depths, sums, _binned(values, torch.cat(on_path)))


def _binned(values: Tensor, is_accepted: Tensor) -> Tensor:
    """float64 [3, NUM_BINS]: nodes, sum of values, accepted nodes, by value."""
    place = (values * NUM_BINS).long().clamp(0, NUM_BINS - 1)
    amounts = (torch.ones_like(values), values, is_accepted)
    return torch.stack(
        [
            torch.zeros(NUM_BINS, dtype=torch.float64).index_add(0, place, amount.double())
            for amount in amounts
        ]
    )
