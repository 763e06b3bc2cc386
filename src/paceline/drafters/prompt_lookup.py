"""Prompt lookup: what followed the newest tokens last time is drafted again. Needs no trained weights.

Prompt lookup decoding (A. Saxena, 2023) and LLMA (arXiv 2304.04487), with three additions: several earlier
occurrences are merged into one tree; a copy that reaches the end of the text goes on with itself, as in LZ77,
so a loop is drafted to any depth; and node values follow what was accepted in this text so far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
import torch

from paceline.drafters.base import refuse_head
from paceline.drafters.ngram_index import NgramIndex, NgramMatch
from paceline.errors import ConfigError
from paceline.sequence import Sequence, VerifyResult
from paceline.targets.base import TargetModel, TargetOutput
from paceline.tree import DraftTree

MIN_NODE_VALUE = 0.05
PRIOR_WEIGHT = 4.0
MEMORY_LEN = 64
SIZE_DISCOUNT = 0.5
AGE_DISCOUNT = 0.5


@dataclass(slots=True)
class _Odds:
    """A success rate that starts as a guess worth `PRIOR_WEIGHT` trials; old trials fade."""

    prior: float
    num_successes: float = 0.0
    num_trials: float = 0.0

    @property
    def rate(self) -> float:
        return (self.prior * PRIOR_WEIGHT + self.num_successes) / (PRIOR_WEIGHT + self.num_trials)

    def add(self, num_successes: int, num_trials: int) -> None:
        self.num_successes += num_successes
        self.num_trials += num_trials
        if self.num_trials > MEMORY_LEN:
            self.num_successes /= 2
            self.num_trials /= 2


@dataclass(slots=True)
class _TextState:
    """What is remembered of one sequence.

    Attributes:
        index: its n-grams.
        is_first_right: by size of the match, how often the first drafted token is accepted.
        is_next_right: how often a further one is, when the one before was.
        last_size: size of the best match of the newest draft; 0 without one.
        last_tree: that draft; None when it was counted.
    """

    index: NgramIndex
    is_first_right: dict[int, _Odds] = field(default_factory=dict)
    is_next_right: _Odds = field(default_factory=lambda: _Odds(0.8))
    last_size: int = 0
    last_tree: DraftTree | None = None

    def catch_up(self, sequence: Sequence) -> None:
        """Index the committed tokens that are new."""
        num_known, prompt_len = len(self.index), len(sequence.prompt_ids)
        if num_known < prompt_len:
            self.index.extend(sequence.prompt_ids[num_known:])
        self.index.extend(sequence.output_ids[max(num_known - prompt_len, 0) :])

    def first_odds(self, size: int) -> _Odds:
        """Odds of the first token after a match of `size` tokens; longer ones start from a better guess."""
        return self.is_first_right.setdefault(size, _Odds(1 - 0.7**size))

    def learn(self, emitted_ids: Seq[int]) -> None:
        """Count how the newest draft did, all of it: some nodes may not have been verified.

        What was emitted shows it, whoever drafted that.
        """
        tree, self.last_tree = self.last_tree, None
        if tree is None or tree.num_draft_tokens == 0 or not emitted_ids:
            return
        num_right = tree.num_matched(emitted_ids)
        self.first_odds(self.last_size).add(min(num_right, 1), 1)
        if num_right:
            is_wrong = num_right < min(int(tree.depths.max()), len(emitted_ids))
            self.is_next_right.add(num_right - 1, num_right - 1 + is_wrong)


class PromptLookupDrafter:
    """Copies continuations of earlier occurrences of the newest tokens.

    Args:
        min_ngram_size: fewest tokens that have to agree.
        max_ngram_size: most tokens that are compared.
        num_matches: earlier occurrences to merge into a tree.
    """

    required_features: tuple[int, ...] = ()

    def __init__(self, min_ngram_size: int = 1, max_ngram_size: int = 3, num_matches: int = 4) -> None:
        if not 1 <= min_ngram_size <= max_ngram_size:
            raise ConfigError(
                f"n-gram sizes are {min_ngram_size} to {max_ngram_size}: "
                "they must be at least 1, the smaller first"
            )
        if num_matches < 1:
            raise ConfigError(f"num_matches is {num_matches}: it must be at least 1")
        self._min_ngram_size = min_ngram_size
        self._max_ngram_size = max_ngram_size
        self._num_matches = num_matches
        self._states: dict[Sequence, _TextState] = {}

    @classmethod
    def build(cls, target: TargetModel, head: Path | None, num_speculative_tokens: int) -> Self:  # noqa: ARG003
        """Make the drafter; there is nothing to load."""
        refuse_head("prompt_lookup", head)
        return cls()

    def propose(self, sequences: Seq[Sequence], max_nodes: int) -> list[DraftTree]:
        """Continuations of the best matches of each sequence, merged; root-only where nothing matches."""
        return [self._propose_one(sequence, max_nodes) for sequence in sequences]

    def observe(self, output: TargetOutput, results: Seq[VerifyResult | None]) -> None:
        """Index what was emitted and count what was accepted."""
        for segment, result in zip(output.segments, results, strict=True):
            state = self._states.get(segment.sequence)
            if state is not None and result is not None and segment.tree is not None:
                state.learn(result.emitted_ids)
                state.catch_up(segment.sequence)

    def release(self, sequence: Sequence) -> None:
        """Forget the n-grams of a sequence."""
        self._states.pop(sequence, None)

    def _propose_one(self, sequence: Sequence, max_nodes: int) -> DraftTree:
        state = self._states.get(sequence)
        if state is None:
            index = NgramIndex(self._min_ngram_size, self._max_ngram_size, self._num_matches)
            state = self._states[sequence] = _TextState(index)
        state.catch_up(sequence)
        matches = state.index.matches()[: self._num_matches]
        state.last_size, state.last_tree = matches[0].size if matches else 0, None
        if not matches or max_nodes <= 0:
            return DraftTree.root_only(sequence.last_token_id)
        first = state.first_odds(matches[0].size).rate
        following = state.is_next_right.rate
        # No node of a path is worth drafting below this depth.
        depth = 1 + int(math.log(min(MIN_NODE_VALUE / first, 1.0)) / math.log(min(following, 0.99)))
        paths = [state.index.continuation(match.end, min(depth, max_nodes)) for match in matches]
        tree = DraftTree.from_paths(sequence.last_token_id, paths, [first * s for s in _shares(matches)])
        # In numpy: torch takes longer to begin than a few dozen numbers take.
        fading = following ** np.maximum(tree.depths.numpy() - 1, 0)
        values = tree.node_values.numpy() * fading.astype(np.float32)
        tree = tree.with_values(torch.from_numpy(values))
        num_worthy = int(np.count_nonzero(values[1:] >= MIN_NODE_VALUE))
        # One node costs next to nothing; without it a text that begins to repeat itself would go unnoticed.
        state.last_tree = tree.take(min(max_nodes, max(num_worthy, 1)))
        return state.last_tree


def _shares(matches: Seq[NgramMatch]) -> list[float]:
    """How the chance that a copy is right divides over the matches: less for shorter and for older ones."""
    best = matches[0].size
    weights = [
        SIZE_DISCOUNT ** (best - match.size) * AGE_DISCOUNT**rank for rank, match in enumerate(matches)
    ]
    total = sum(weights)
    return [weight / total for weight in weights]
