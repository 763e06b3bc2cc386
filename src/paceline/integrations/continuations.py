"""Log-probabilities of given continuations under a target: what evaluations of multiple choice ask for.

Inputs are read in the order of their ids, each behind the one before it in the same cache, so what two
neighbours begin with is read once: the question of a multiple choice, the examples of a few-shot prompt.
Several lanes, each with a run of neighbours, share every forward. Inputs that differ in nothing but the last
continuation token are read once altogether.

Read `score_continuations`, then `_Lane`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.errors import RequestError
from paceline.sampling import SamplingParameters
from paceline.sequence import Segment, Sequence
from paceline.targets.base import TargetModel

ROWS_PER_FORWARD = 512
"""Most tokens of one forward, all lanes together."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """Tokens to score, and what stands in front of them.

    Attributes:
        context_ids: at least one token.
        token_ids: at least one token.
    """

    context_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class ContinuationScore:
    """How likely a continuation is.

    Attributes:
        log_prob: sum over its tokens, natural logarithm, from fp32 logits without any processing.
        is_greedy: whether each of its tokens is the argmax of its position.
    """

    log_prob: float = 0.0
    is_greedy: bool = True

    def add(self, log_prob: float, is_best: bool) -> None:
        """Count one token."""
        self.log_prob += log_prob
        self.is_greedy = self.is_greedy and is_best


@dataclass(slots=True)
class _Input:
    """What one pass through the target reads, and whose scores come from it.

    Attributes:
        ids: context and continuation without its last token.
        first_row: least position whose logits anybody needs.
        last_ids: per member the token behind the input.
        first_rows: per member the position that predicts its first token.
        scores: per member.
    """

    ids: tuple[int, ...]
    first_row: int
    last_ids: list[int] = field(default_factory=list)
    first_rows: list[int] = field(default_factory=list)
    scores: list[ContinuationScore] = field(default_factory=list)

    def wanted(self, row: int) -> list[int]:
        """Tokens that position `row` is asked about: the next one of the input, or each member's last."""
        return self.last_ids if row == len(self.ids) - 1 else [self.ids[row + 1]]

    def take(self, row: int, log_probs: Seq[float], best_id: int) -> None:
        """Count what position `row` says about `wanted(row)`."""
        wanted = self.wanted(row)
        is_last = row == len(self.ids) - 1
        for member, score in enumerate(self.scores):
            if row >= self.first_rows[member]:
                own = member if is_last else 0
                score.add(log_probs[own], wanted[own] == best_id)


class _Lane:
    """Inputs that are read one behind the other in the same cache.

    Args:
        inputs: in the order of their ids.
        target: reads them.
    """

    def __init__(self, inputs: Seq[_Input], target: TargetModel) -> None:
        self._waiting = deque(inputs)
        self._target = target
        self.sequence: Sequence | None = None
        self.input = self._waiting[0]
        self._advance()

    def segment(self, num_tokens: int) -> Segment:
        """The next piece of the input."""
        sequence = self._sequence()
        start = self._target.cached_len(sequence)
        return Segment(sequence, self.input.ids[start : start + num_tokens], None)

    @property
    def is_finished(self) -> bool:
        """Whether all inputs are read."""
        return self.sequence is None

    def finish_piece(self) -> int:
        """Go to the next input when this one is read.

        Returns:
            How many continuations are scored now that were not before.
        """
        sequence = self._sequence()
        if self._target.cached_len(sequence) < len(self.input.ids):
            return 0
        num_scored = len(self.input.scores)
        # All that is cached has to be in the sequence for the next one to compare with.
        sequence.output_ids += self.input.ids[len(sequence) :]
        self._advance()
        return num_scored

    def release(self) -> None:
        """Free the cache."""
        if self.sequence is not None:
            self._target.release(self.sequence)
            self.sequence = None

    def _advance(self) -> None:
        """Take up the next input; the cache of the former one is kept as far as both agree."""
        if not self._waiting:
            self.release()
            return
        self.input = self._waiting.popleft()
        # A cache is taken over up to the last token of the new sequence: its logits are always computed.
        prompt_ids = list(self.input.ids[: self.input.first_row + 1])
        context_len = self._target.context_len + 1
        sequence = Sequence(prompt_ids, SamplingParameters(), frozenset(), context_len, seed=0)
        if self.sequence is not None:
            self._target.adopt(sequence, self.sequence)
        self.sequence = sequence

    def _sequence(self) -> Sequence:
        if self.sequence is None:
            raise RequestError("this lane has no input left")
        return self.sequence


@torch.inference_mode()
def score_continuations(
    target: TargetModel,
    continuations: Seq[Continuation],
    *,
    num_lanes: int = 1,
    on_scored: Callable[[int], None] | None = None,
) -> list[ContinuationScore]:
    """Score continuations under the target.

    Args:
        target: not in use by anybody else meanwhile.
        continuations: each of at most `target.context_len + 1` tokens, context included.
        num_lanes: inputs that are read at once.
        on_scored: called with a number of continuations as they are done.

    Returns:
        One score each, in order.

    Raises:
        RequestError: a continuation or its context is empty, or both together are too long.
    """
    scores = [ContinuationScore() for _ in continuations]
    inputs = _inputs(continuations, scores, target.context_len, target.vocab_size)
    per_lane = -(-len(inputs) // max(num_lanes, 1))
    lanes = [_Lane(inputs[i : i + per_lane], target) for i in range(0, len(inputs), per_lane or 1)]
    try:
        while lanes:
            _read_pieces(target, lanes)
            num_scored = sum(lane.finish_piece() for lane in lanes)
            if on_scored is not None and num_scored:
                on_scored(num_scored)
            lanes = [lane for lane in lanes if not lane.is_finished]
    finally:
        for lane in lanes:
            lane.release()
    return scores


def _inputs(
    continuations: Seq[Continuation],
    scores: Seq[ContinuationScore],
    context_len: int,
    vocab_size: int,
) -> list[_Input]:
    """What has to be read, each input once, in the order of ids."""
    inputs: dict[tuple[int, ...], _Input] = {}
    for continuation, score in zip(continuations, scores, strict=True):
        ids = (*continuation.context_ids, *continuation.token_ids)
        if not continuation.context_ids or not continuation.token_ids:
            raise RequestError(
                f"{len(continuation.context_ids)} context tokens and {len(continuation.token_ids)} to score: "
                "give at least one of each"
            )
        if len(ids) > context_len + 1:
            raise RequestError(
                f"context and continuation have {len(ids)} tokens and the target's context is {context_len}: "
                f"give at most {context_len + 1}"
            )
        outside = next((i for i in ids if not 0 <= i < vocab_size), None)
        if outside is not None:
            raise RequestError(f"token id {outside} is not one of the target's, 0 to {vocab_size - 1}")
        first_row = len(continuation.context_ids) - 1
        item = inputs.setdefault(ids[:-1], _Input(ids[:-1], first_row))
        item.first_row = min(item.first_row, first_row)
        item.last_ids.append(ids[-1])
        item.first_rows.append(first_row)
        item.scores.append(score)
    return [inputs[ids] for ids in sorted(inputs)]


def _read_pieces(target: TargetModel, lanes: Seq[_Lane]) -> None:
    """One forward over the next piece of every lane."""
    num_tokens = max(ROWS_PER_FORWARD // len(lanes), 1)
    segments = [lane.segment(num_tokens) for lane in lanes]
    starts = [target.cached_len(segment.sequence) for segment in segments]
    output = target.forward(segments)
    rows: list[int] = []
    places: list[tuple[_Input, int]] = []
    for index, (lane, start) in enumerate(zip(lanes, starts, strict=True)):
        for position, row in enumerate(output.rows(index), start=start):
            if position >= lane.input.first_row:
                rows.append(row)
                places.append((lane.input, position))
    if rows:
        _count(output.logits(torch.tensor(rows, device=output.hidden.device)), places)


def _count(logits: Tensor, places: Seq[tuple[_Input, int]]) -> None:
    """Add what rows of logits say to the scores.

    Args:
        logits: [n, V].
        places: input and position of each row.
    """
    log_probs = torch.log_softmax(logits.to(torch.float32), dim=-1)
    wanted = [item.wanted(position) for item, position in places]
    rows = torch.tensor([row for row, ids in enumerate(wanted) for _ in ids], device=logits.device)
    ids = torch.tensor([token_id for ids in wanted for token_id in ids], device=logits.device)
    found = iter(log_probs[rows, ids].tolist())
    best = log_probs.argmax(dim=-1).tolist()
    for (item, position), own, best_id in zip(places, wanted, best, strict=True):
        item.take(position, [next(found) for _ in own], best_id)
