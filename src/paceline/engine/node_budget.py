"""How many nodes to draft: as many as raise the expected tokens per second on this machine.

A drafter says what each node is worth (the chance that it is accepted); `ForwardCost` knows what a forward of
so many rows takes here. Taking the k most valuable nodes of all trees in a round is expected to emit
`B + sum of their values` tokens in `drafting + cost(B + k)` seconds; the best k is kept. So one rule gives
the length and the width of drafts, divides them among the sequences of a batch, and drafts less as the batch
grows.

Values are what the drafter believes. They are corrected by what was accepted, per depth, and costs by what
forwards took: another process, or a batch of other lengths than measured, slows all of them down alike, and
drafting is weighed by its own time. Unless the last drafted rounds are expected to be faster than plain steps
by a margin even so (`LEAST_GAIN`), the drafter is not asked for a while; then it gets a few rounds to show
that things have changed. (Not after a single poor round: a drafter that copies has nothing to offer most of
the time, and much in between.)

Read `AdaptiveBudget.prune`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.config import read_width
from paceline.engine.forward_cost import ForwardCost, measured_cost
from paceline.engine.stats import RoundTiming
from paceline.sequence import VerifyResult
from paceline.targets.base import TargetModel
from paceline.tree import DraftTree

MAX_NODES = 64
"""Most nodes that a drafter is asked for under the adaptive budget."""
LEAST_ASKED = 4
"""Nodes that it is asked for at least."""
ASKED_PER_KEPT = 3
"""Further ones, for each that a sequence kept lately."""
FIRST_KEPT = 8
"""What a sequence is taken to keep before anything was seen."""
MAX_DEPTH = 32
LENGTH_STEP = 64
"""Cached tokens after which costs are read off anew."""
DECAY = 0.98
"""Of what is remembered about acceptance, per drafted round."""
PRIOR = 2.0
"""Nodes' worth of trust in the drafter's own values before anything was seen."""
PROBE_ROUNDS = 4
"""Drafted rounds by which it is judged whether drafting pays."""
WINDOW_DECAY = 0.95
"""Of those rounds' weight, per further round."""
LEAST_GAIN = 0.05
"""By how much drafting has to be expected to be faster, for one sequence and again for every doubling of their
number: estimates err, and sequences that are drafted for end at different times, the last ones alone."""
COST_WEIGHT = 0.1
"""Of the newest round in what drafting takes and in how far forwards are from their measured cost."""
COST_RANGE = 4.0
"""Factor up to which a single round is believed to be slower or faster than measured."""
FIRST_PAUSE, LONGEST_PAUSE = 8, 256
"""Plain rounds between two probes, doubled while drafting does not pay."""


def budget_of(
    width: int | str, target: TargetModel, progress: Callable[[str], None] | None = None
) -> NodeBudget:
    """The budget behind a value of `num_speculative_tokens`.

    Args:
        width: whole number, or `auto`.
        target: whose forwards the adaptive budget weighs.
        progress: told in one line when they have to be measured first.

    Raises:
        ConfigError: the width is neither.
    """
    width = read_width(width)
    if isinstance(width, int):
        return FixedBudget(width)
    cost = measured_cost(target, progress=progress)
    return AdaptiveBudget(cost, pads=target.pads_rows)


class NodeBudget(Protocol):
    """Decides how much is drafted."""

    max_nodes: int
    """Most nodes per sequence that it ever allots."""

    def allot(self, num_sequences: int) -> int:
        """Nodes that the drafter may propose per sequence this round; 0: do not ask it."""

    def prune(self, trees: Seq[DraftTree], cached_len: float) -> list[DraftTree]:
        """The nodes worth verifying, over all trees of the round; `cached_len` is their mean."""

    def observe(self, trees: Seq[DraftTree], results: Seq[VerifyResult], timing: RoundTiming) -> None:
        """Learn from a finished round."""


class FixedBudget:
    """Always the same number of nodes for every sequence."""

    def __init__(self, max_nodes: int) -> None:
        self.max_nodes = max_nodes

    def allot(self, num_sequences: int) -> int:  # noqa: ARG002
        """The number."""
        return self.max_nodes

    def prune(self, trees: Seq[DraftTree], cached_len: float) -> list[DraftTree]:  # noqa: ARG002
        """The most valuable nodes of each tree."""
        return [tree.take(self.max_nodes) for tree in trees]

    def observe(self, trees: Seq[DraftTree], results: Seq[VerifyResult], timing: RoundTiming) -> None:
        """Nothing is learned."""


class AdaptiveBudget:
    """Drafts while the next node is expected to raise tokens per second.

    Args:
        cost: of a forward on this machine.
        max_nodes: most nodes per sequence.
        pads: whether a forward computes as many rows for every sequence as for the widest one.
    """

    def __init__(self, cost: ForwardCost, max_nodes: int = MAX_NODES, *, pads: bool = False) -> None:
        self.max_nodes = max_nodes
        self._cost = cost
        self._pads = pads
        self._claimed = torch.full((MAX_DEPTH,), PRIOR, dtype=torch.float64)
        self._accepted = torch.full((MAX_DEPTH,), PRIOR, dtype=torch.float64)
        self._draft_seconds = _Mean(0.0)
        # Seconds of a forward over its measured cost.
        self._slowness = _Mean(1.0)
        # The most nodes that a sequence kept lately: asking for many more would only be sorted out again.
        self._most_kept = float(FIRST_KEPT)
        self._pause = 0
        self._next_pause = FIRST_PAUSE
        self._has_drafts = self._is_asked = False
        # Expected tokens and seconds of the newest drafted rounds, and those of the round in flight.
        self._window = _Window()
        self._expected, self._forward_seconds, self._plain_rate = 0.0, 0.0, 0.0
        self._table = torch.zeros(0, dtype=torch.float64)
        self._table_len = -1

    def allot(self, num_sequences: int) -> int:  # noqa: ARG002
        """A few more nodes than were worth verifying lately, or none while drafting pauses."""
        self._has_drafts = False
        self._is_asked = self._pause == 0
        if self._pause > 0:
            self._pause -= 1
            return 0
        return min(self.max_nodes, LEAST_ASKED + int(ASKED_PER_KEPT * self._most_kept))

    def prune(self, trees: Seq[DraftTree], cached_len: float) -> list[DraftTree]:
        """Keep the nodes with which the round's expected tokens per second are highest."""
        num_sequences = len(trees)
        corrected = self._corrected(trees)
        self._has_drafts = any(tree.num_draft_tokens for tree in trees)
        slowness = self._slowness.value
        plain = slowness * float(self._seconds(num_sequences, cached_len)[num_sequences])
        self._plain_rate = num_sequences / plain
        self._expected, self._forward_seconds = float(num_sequences), plain
        if not self._has_drafts:
            return corrected
        gains = _gains_by_level(corrected) if self._pads else _gains(corrected)
        step = num_sequences if self._pads else 1
        most_rows = num_sequences + step * (len(gains) - 1)
        seconds = self._seconds(most_rows, cached_len)[num_sequences : most_rows + 1 : step]
        seconds = slowness * seconds
        rates = (gains + num_sequences) / (seconds + self._draft_seconds.value)
        best = int(rates.argmax())
        # Drafting is paid for by now; whether to draft next time is decided when the round is over.
        self._expected, self._forward_seconds = num_sequences + float(gains[best]), float(seconds[best])
        kept = [tree.take(best) for tree in corrected] if self._pads else _share(corrected, best)
        most = max(tree.num_draft_tokens for tree in kept)
        self._most_kept = max(most, WINDOW_DECAY * self._most_kept)
        return kept

    def observe(self, trees: Seq[DraftTree], results: Seq[VerifyResult], timing: RoundTiming) -> None:
        """Compare what the verified nodes were worth with what was accepted; note the drafting time."""
        num_rows = sum(len(tree) for tree in trees)
        # Rounds that read prompts as well say little about the others.
        if self._is_asked and timing.num_rows == num_rows:
            if self._has_drafts:
                self._draft_seconds.add(timing.draft_seconds)
            # On CUDA a forward is only started; waiting for it counts as verification.
            seconds = timing.forward_seconds + timing.verify_seconds
            expected = self._forward_seconds / self._slowness.value
            self._slowness.add(min(max(seconds / expected, 1.0 / COST_RANGE), COST_RANGE))
            self._judge(len(trees), timing.draft_seconds)
        if num_rows == len(trees):
            return
        self._claimed = PRIOR + DECAY * (self._claimed - PRIOR)
        self._accepted = PRIOR + DECAY * (self._accepted - PRIOR)
        factors = self._factors()
        drafted = [tree for tree in trees if tree.num_draft_tokens]
        levels = (torch.cat([tree.depths[1:] for tree in drafted]) - 1).clamp_(max=MAX_DEPTH - 1)
        claimed = torch.cat([tree.node_values[1:] for tree in drafted]).double() / factors[levels]
        self._claimed.index_add_(0, levels, claimed)
        for result in results:
            if result.accepted_ids:
                self._accepted[: len(result.accepted_ids)] += 1.0

    def _seconds(self, num_rows: int, cached_len: float) -> Tensor:
        """float64: cost of forwards of 0, 1, ... at least `num_rows` rows, for lengths rounded down."""
        length = int(cached_len) // LENGTH_STEP * LENGTH_STEP
        if length != self._table_len or len(self._table) <= num_rows:
            self._table = self._cost.seconds(torch.arange(max(num_rows, self.max_nodes) + 1), length)
            self._table_len = length
        return self._table

    def _factors(self) -> Tensor:
        """float64 [MAX_DEPTH]: accepted over claimed, never rising with depth, so that trees stay trees."""
        return (self._accepted / self._claimed).cummin(0).values

    def _corrected(self, trees: Seq[DraftTree]) -> list[DraftTree]:
        """The trees with corrected values."""
        factors = torch.cat([torch.ones(1), self._factors().float()])
        levels = torch.cat([tree.depths for tree in trees]).clamp_(max=MAX_DEPTH)
        values = torch.cat([tree.node_values for tree in trees]) * factors[levels]
        parts = torch.split(values.clamp_(max=1.0), [len(tree) for tree in trees])
        return [
            tree.with_values(part) if tree.num_draft_tokens else tree
            for tree, part in zip(trees, parts, strict=True)
        ]

    def _judge(self, num_sequences: int, draft_seconds: float) -> None:
        """Pause drafting unless the newest drafted rounds are expected to beat plain steps by a margin."""
        self._window.add(self._forward_seconds + draft_seconds, self._expected / self._plain_rate)
        if self._window.num_rounds < PROBE_ROUNDS:
            return
        least = 1.0 + LEAST_GAIN * math.log2(2 * num_sequences)
        if least * self._window.seconds <= self._window.plain_seconds:
            self._next_pause = FIRST_PAUSE
            return
        self._pause = self._next_pause
        self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)
        self._window = _Window()


@dataclass(slots=True)
class _Window:
    """Seconds of the newest rounds and of plain ones for as many tokens, older ones fading."""

    seconds: float = 0.0
    plain_seconds: float = 0.0
    num_rounds: int = 0

    def add(self, seconds: float, plain_seconds: float) -> None:
        self.seconds = WINDOW_DECAY * self.seconds + seconds
        self.plain_seconds = WINDOW_DECAY * self.plain_seconds + plain_seconds
        self.num_rounds += 1


@dataclass(slots=True)
class _Mean:
    """A plain mean of the first values, then an exponential one; `value` is a guess before the first."""

    value: float
    num_values: int = 0

    def add(self, value: float) -> None:
        self.num_values += 1
        self.value += max(COST_WEIGHT, 1.0 / self.num_values) * (value - self.value)


def _gains(trees: Seq[DraftTree]) -> Tensor:
    """float64 [N + 1]: expected tokens of the k most valuable nodes over all trees, k from 0."""
    values = torch.cat([tree.node_values[1:] for tree in trees]).double()
    return torch.cat([torch.zeros(1, dtype=torch.float64), values.sort(descending=True).values.cumsum(0)])


def _gains_by_level(trees: Seq[DraftTree]) -> Tensor:
    """float64 [N + 1]: expected tokens when every tree keeps its k most valuable nodes, k from 0."""
    widest = max(tree.num_draft_tokens for tree in trees)
    values = torch.zeros(len(trees), widest + 1, dtype=torch.float64)
    for row, tree in zip(values, trees, strict=True):
        row[1 : len(tree)] = tree.node_values[1:].sort(descending=True).values
    return values.sum(0).cumsum(0)


def _share(trees: Seq[DraftTree], num_kept: int) -> list[DraftTree]:
    """The `num_kept` most valuable nodes over all trees; equal values go to the earlier tree and parent."""
    owner = torch.cat([torch.full((tree.num_draft_tokens,), i) for i, tree in enumerate(trees)])
    values = torch.cat([tree.node_values[1:] for tree in trees])
    order = values.argsort(descending=True, stable=True)[:num_kept]
    counts = torch.bincount(owner[order], minlength=len(trees)).tolist()
    return [tree.take(count) for tree, count in zip(trees, counts, strict=True)]
