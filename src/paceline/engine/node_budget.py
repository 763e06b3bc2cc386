"""How many nodes to draft: as many as raise the expected tokens per second on this machine.

A drafter says what each node is worth (the chance that it is accepted); `ForwardCost` knows what a forward of
so many rows takes here. Taking the k most valuable nodes of all trees in a round is expected to emit
`B + sum of their values` tokens in `drafting + cost(B + k)` seconds; the best k is kept. So one rule gives
the length and the width of drafts, divides them among the sequences of a batch, and drafts less as the batch
grows.

Values are what the drafter believes. They are corrected by what was accepted, per depth, and costs by what
forwards took (`engine/cost_correction.py`): another process, or a batch of other lengths than measured, makes
all of them slower, and wide ones more than others. Drafting is weighed by its own time. Unless the last
drafted rounds are expected to be faster than plain steps by a margin even so (`LEAST_GAIN`), the drafter is
not asked for a while; then it gets a few rounds to show that things have changed. (Not after a single poor
round: a drafter that copies has nothing to offer most of the time, and much in between.)

Read `AdaptiveBudget.prune`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config import read_width
from paceline.engine.cost_correction import CostCorrection, MeasuredCost
from paceline.engine.forward_cost import ForwardCost, measured_cost
from paceline.engine.stats import RoundTiming
from paceline.sequence import VerifyResult
from paceline.targets.base import TargetModel
from paceline.tree import DraftTree

Reals = NDArray[np.float64]

MAX_NODES = 64
"""Most nodes that a drafter is asked for under the adaptive budget."""
LEAST_ASKED = 8
"""Nodes that it is asked for at least."""
ASKED_PER_KEPT = 1.5
"""Further ones, for each that a sequence kept lately."""
FIRST_KEPT = 8
"""What a sequence is taken to keep before anything was seen."""
KEPT_DECAY = 0.8
"""Of the most that one kept, per drafted round."""
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
"""By how much drafting has to be expected to be faster for one sequence, and by half of it more for every
doubling of their number: estimates err, and sequences that are drafted for end at different times, the last
alone."""
COST_WEIGHT = 0.1
"""Of the newest round in what drafting takes."""
FIRST_PAUSE, LONGEST_PAUSE = 8, 256
"""Plain rounds between two probes, doubled while drafting does not pay."""
TIMED_ROUNDS = 8
"""Plain rounds of a pause, the newest, that tell what a plain step costs: drafted ones tell it only together
with what further rows add. More would push those out of what is remembered."""


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

    def allot(self, num_sequences: int, cached_len: float) -> int:
        """Nodes that the drafter may propose per sequence this round; 0: do not ask it.

        Args:
            num_sequences: of the round.
            cached_len: mean of their cached tokens.
        """

    def prune(self, trees: Seq[DraftTree], cached_len: float) -> list[DraftTree]:
        """The nodes worth verifying, over all trees of the round; `cached_len` is their mean."""

    def observe(self, trees: Seq[DraftTree], results: Seq[VerifyResult], timing: RoundTiming) -> None:
        """Learn from a finished round."""


class FixedBudget:
    """Always the same number of nodes for every sequence."""

    def __init__(self, max_nodes: int) -> None:
        self.max_nodes = max_nodes

    def allot(self, num_sequences: int, cached_len: float) -> int:  # noqa: ARG002
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
        # In numpy: torch takes longer to begin than a few dozen numbers take, and this runs every round.
        self._claimed = np.full(MAX_DEPTH, PRIOR)
        self._accepted = np.full(MAX_DEPTH, PRIOR)
        self._factors = _factors(self._accepted, self._claimed)
        self._draft_seconds = _Mean(0.0)
        self._correction = CostCorrection()
        # The most nodes that a sequence kept lately: asking for many more would only be sorted out again.
        self._most_kept = float(FIRST_KEPT)
        self._pause = 0
        self._next_pause = FIRST_PAUSE
        self._has_drafts = self._is_asked = False
        # Expected tokens and seconds of the newest drafted rounds, and those of the round in flight.
        self._window = _Window()
        self._expected, self._forward_seconds, self._plain_rate = 0.0, 0.0, 0.0
        # What the table says of the round in flight; None: it is not compared.
        self._measured: MeasuredCost | None = None
        self._table: Reals = np.zeros(0)
        self._table_len = -1

    def allot(self, num_sequences: int, cached_len: float) -> int:
        """A few more nodes than were worth verifying lately, or none while drafting pauses."""
        self._has_drafts = False
        self._is_asked = self._pause == 0
        if self._pause > 0:
            self._pause -= 1
            self._measured = None
            if self._pause < TIMED_ROUNDS:
                plain = float(self._seconds(num_sequences, cached_len)[num_sequences])
                self._measured = MeasuredCost(plain, 0.0)
            return 0
        return min(self.max_nodes, LEAST_ASKED + int(ASKED_PER_KEPT * self._most_kept))

    def prune(self, trees: Seq[DraftTree], cached_len: float) -> list[DraftTree]:
        """Keep the nodes with which the round's expected tokens per second are highest."""
        num_sequences = len(trees)
        self._has_drafts = any(tree.num_draft_tokens for tree in trees)
        measured_plain = float(self._seconds(num_sequences, cached_len)[num_sequences])
        plain = self._correction.base * measured_plain
        self._plain_rate = num_sequences / plain
        self._expected, self._forward_seconds = float(num_sequences), plain
        self._measured = MeasuredCost(measured_plain, 0.0)
        if not self._has_drafts:
            return list(trees)
        grove = _Grove.of(trees, self._factors)
        gains = grove.gains_by_level() if self._pads else grove.gains()
        step = num_sequences if self._pads else 1
        most_rows = num_sequences + step * (len(gains) - 1)
        seconds = self._seconds(most_rows, cached_len)[num_sequences : most_rows + 1 : step]
        extra = seconds - measured_plain
        seconds = plain + self._correction.slope * extra
        rates = (gains + num_sequences) / (seconds + self._draft_seconds.value)
        best = int(np.argmax(rates))
        # Drafting is paid for by now; whether to draft next time is decided when the round is over.
        self._expected, self._forward_seconds = num_sequences + float(gains[best]), float(seconds[best])
        self._measured = MeasuredCost(measured_plain, float(extra[best]))
        kept = grove.take_of_each(best) if self._pads else grove.take(best)
        most = max(tree.num_draft_tokens for tree in kept)
        self._most_kept = max(most, KEPT_DECAY * self._most_kept)
        return kept

    def observe(self, trees: Seq[DraftTree], results: Seq[VerifyResult], timing: RoundTiming) -> None:
        """Compare what the verified nodes were worth with what was accepted; note the drafting time."""
        num_rows = sum(len(tree) for tree in trees)
        self._learn(len(trees), timing, reads_prompts=timing.num_rows != num_rows)
        if num_rows == len(trees):
            return
        self._claimed = PRIOR + DECAY * (self._claimed - PRIOR)
        self._accepted = PRIOR + DECAY * (self._accepted - PRIOR)
        # Lists, for the same reason. What was verified had been corrected; roots, at level 0, count nowhere.
        claimed, factors = [0.0] * (MAX_DEPTH + 1), self._factors.tolist()
        for tree in trees:
            for depth, value in zip(tree.depths.tolist(), tree.node_values.tolist(), strict=True):
                level = min(depth, MAX_DEPTH)
                claimed[level] += value / factors[level]
        self._claimed += claimed[1:]
        for result in results:
            if result.accepted_ids:
                self._accepted[: len(result.accepted_ids)] += 1.0
        self._factors = _factors(self._accepted, self._claimed)

    def _learn(self, num_sequences: int, timing: RoundTiming, *, reads_prompts: bool) -> None:
        """Compare what the round took with what it was expected to take.

        A forward that also reads prompts says nothing about the table. Whether drafting pays is judged by
        expected seconds, and so beside prompts too; not where nothing was drafted, since that may be for
        want of a prompt that has been read.
        """
        # On CUDA a forward is only started; waiting for it counts as verification.
        seconds = timing.forward_seconds + timing.verify_seconds
        if self._measured is not None and not reads_prompts:
            self._correction.add(self._measured, seconds)
        if self._is_asked and (self._has_drafts or not reads_prompts):
            if self._has_drafts:
                self._draft_seconds.add(timing.draft_seconds)
            self._judge(num_sequences, timing.draft_seconds)

    def _seconds(self, num_rows: int, cached_len: float) -> Reals:
        """float64: cost of forwards of 0, 1, ... at least `num_rows` rows, for lengths rounded down."""
        length = int(cached_len) // LENGTH_STEP * LENGTH_STEP
        if length != self._table_len or len(self._table) <= num_rows:
            rows = torch.arange(max(num_rows, self.max_nodes) + 1)
            self._table = self._cost.seconds(rows, length).numpy()
            self._table_len = length
        return self._table

    def _judge(self, num_sequences: int, draft_seconds: float) -> None:
        """Pause drafting unless the newest drafted rounds are expected to beat plain steps by a margin."""
        self._window.add(self._forward_seconds + draft_seconds, self._expected / self._plain_rate)
        if self._window.num_rounds < PROBE_ROUNDS:
            return
        least = 1.0 + LEAST_GAIN * (1.0 + math.log2(num_sequences) / 2)
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


def _factors(accepted: Reals, claimed: Reals) -> Reals:
    """float64 [MAX_DEPTH + 1]: accepted over claimed by depth, never rising, so that trees stay trees.

    That of the root is 1.
    """
    return np.concatenate([[1.0], np.minimum.accumulate(accepted / claimed)])


def _joined(parts: Seq[Tensor]) -> NDArray[Any]:
    """Several small tensors in one array."""
    return parts[0].numpy() if len(parts) == 1 else np.concatenate([part.numpy() for part in parts])


@dataclass(frozen=True, slots=True)
class _Grove:
    """The trees of a round with corrected values.

    Attributes:
        trees: as drafted.
        starts: int64 [B + 1], first row of each tree, and the number of rows.
        values: float32 [R].
        nodes: int64 [N], rows that are no roots, the most valuable first; of equal ones the earlier.
    """

    trees: Seq[DraftTree]
    starts: NDArray[np.int64]
    values: NDArray[np.float32]
    nodes: NDArray[np.int64]

    @classmethod
    def of(cls, trees: Seq[DraftTree], factors: Reals) -> _Grove:
        """Correct the values by depth and rank the nodes."""
        levels = np.minimum(_joined([tree.depths for tree in trees]), MAX_DEPTH)
        corrected = _joined([tree.node_values for tree in trees]) * factors[levels].astype(np.float32)
        values = np.minimum(corrected, np.float32(1.0))
        starts = np.cumsum([0, *map(len, trees)])
        nodes = np.arange(1, len(values))
        if len(trees) > 1:
            nodes = np.delete(nodes, starts[1:-1] - 1)
        return cls(trees, starts, values, nodes[np.argsort(-values[nodes], kind="stable")])

    def gains(self) -> Reals:
        """float64 [N + 1]: expected tokens of the k most valuable nodes over all trees, k from 0."""
        gains = np.zeros(len(self.nodes) + 1)
        np.cumsum(self.values[self.nodes], dtype=np.float64, out=gains[1:])
        return gains

    def gains_by_level(self) -> Reals:
        """float64 [N + 1]: expected tokens when every tree keeps its k most valuable nodes, k from 0."""
        gains = np.zeros(int(np.diff(self.starts).max()))
        for start, end in zip(self.starts, self.starts[1:], strict=False):
            gains[1 : end - start] -= np.sort(-self.values[start + 1 : end])
        return np.cumsum(gains)

    def take(self, num_kept: int) -> list[DraftTree]:
        """The `num_kept` most valuable nodes over all trees."""
        kept = np.sort(self.nodes[:num_kept])
        bounds = np.searchsorted(kept, self.starts)
        return [
            tree.selected(kept[bounds[i] : bounds[i + 1]] - start, self.values[start : start + len(tree)])
            for i, (tree, start) in enumerate(zip(self.trees, self.starts, strict=False))
        ]

    def take_of_each(self, num_kept: int) -> list[DraftTree]:
        """The `num_kept` most valuable nodes of every tree."""
        parts = np.split(self.values, self.starts[1:-1])
        return [
            tree.with_values(torch.from_numpy(own)).take(num_kept)
            for tree, own in zip(self.trees, parts, strict=True)
        ]
