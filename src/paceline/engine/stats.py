"""What drafting brought: counts and times of one request.

Counting follows what was emitted, never what was sent over a wire: a token counts when the trimmed result of
a round added it, a drafted node counts as accepted when it lies on the kept path, and nothing after the first
rejection counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from time import perf_counter

from paceline.sequence import VerifyResult
from paceline.tree import DraftTree


@dataclass(frozen=True, slots=True)
class RoundTiming:
    """Seconds that the forward group of one round took.

    Attributes:
        draft_seconds: asking the drafter.
        forward_seconds: the target's forward.
        verify_seconds: processors and verifier.
        commit_seconds: trimming, cache, drafter's observation.
        num_sequences: sequences that shared the forward.
        num_rows: token rows of the forward, prompt chunks included.
    """

    draft_seconds: float
    forward_seconds: float
    verify_seconds: float
    commit_seconds: float
    num_sequences: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class GenerationStatistics:
    """Counts and times of one finished (or cancelled) request.

    Attributes:
        num_rounds: forwards that emitted at least one token.
        num_draft_tokens: drafted nodes that were verified, roots not counted.
        num_accepted_tokens: drafted tokens that were emitted.
        num_output_tokens: emitted tokens: accepted ones and the target's own.
        mean_acceptance_length: emitted tokens a round, the target's own token included.
        accepted_per_round: drafted tokens emitted a round.
        acceptance_rate: accepted over drafted, between 0 and 1.
        accepted_per_position: entry d: rounds in which a node of depth d + 1 was emitted.
        mean_forward_width: tree rows a round, root included.
        seconds: from submission to the last token.
        tokens_per_second: emitted tokens over `seconds`.
        draft_seconds: time in the drafter; like the next three it is the time of the whole batch.
        forward_seconds: time in the target's forward.
        verify_seconds: time in processors and verifier.
        commit_seconds: time after verification.
        num_relaxed_tokens: emitted tokens that a lossy verifier kept although the target would have chosen
            others.
        regret_spent: on them, in logits: by so much their log-probabilities are below the argmax's.
        refusals: why the paths ended, by reason (`sequence.Refused`), and how often; without rounds that a
            stop cut short, and empty with other verifiers.
    """

    num_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_output_tokens: int
    mean_acceptance_length: float
    accepted_per_round: float
    acceptance_rate: float
    accepted_per_position: list[int]
    mean_forward_width: float
    seconds: float
    tokens_per_second: float
    draft_seconds: float
    forward_seconds: float
    verify_seconds: float
    commit_seconds: float
    num_relaxed_tokens: int = 0
    regret_spent: float = 0.0
    refusals: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, int | float | list[int] | dict[str, int]]:
        """The fields, ready for JSON."""
        return asdict(self)


class StatisticsRecorder:
    """Collects the rounds of one request; its clock starts when it is made.

    Args:
        clock: seconds from any fixed point; tests pass their own.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._started = self._last = clock()
        self._num_rounds = 0
        self._num_draft_tokens = 0
        self._num_accepted_tokens = 0
        self._num_output_tokens = 0
        self._num_rows = 0
        self._accepted_per_position: list[int] = []
        self._draft_seconds = 0.0
        self._forward_seconds = 0.0
        self._verify_seconds = 0.0
        self._commit_seconds = 0.0
        self._num_relaxed_tokens = 0
        self._regret_spent = 0.0
        self._refusals: dict[str, int] = {}

    def record(self, tree: DraftTree, result: VerifyResult, timing: RoundTiming) -> None:
        """Add one round.

        Args:
            tree: what was verified.
            result: what was kept of it, trimmed.
            timing: of the forward that verified it.
        """
        num_accepted = len(result.accepted_ids)
        self._num_rounds += 1
        self._num_draft_tokens += tree.num_draft_tokens
        self._num_accepted_tokens += num_accepted
        self._num_output_tokens += len(result.emitted_ids)
        self._num_rows += len(tree)
        missing = num_accepted - len(self._accepted_per_position)
        self._accepted_per_position += [0] * max(missing, 0)
        for depth in range(num_accepted):
            self._accepted_per_position[depth] += 1
        self._draft_seconds += timing.draft_seconds
        self._forward_seconds += timing.forward_seconds
        self._verify_seconds += timing.verify_seconds
        self._commit_seconds += timing.commit_seconds
        self._num_relaxed_tokens += result.num_relaxed
        self._regret_spent += result.charge
        if result.refusal is not None:
            reason = result.refusal.reason
            self._refusals[reason] = self._refusals.get(reason, 0) + 1
        self._last = self._clock()

    def finish(self) -> GenerationStatistics:
        """The figures so far; a request without rounds has zeros."""
        seconds = self._last - self._started
        return GenerationStatistics(
            num_rounds=self._num_rounds,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
            num_output_tokens=self._num_output_tokens,
            mean_acceptance_length=_ratio(self._num_output_tokens, self._num_rounds),
            accepted_per_round=_ratio(self._num_accepted_tokens, self._num_rounds),
            acceptance_rate=_ratio(self._num_accepted_tokens, self._num_draft_tokens),
            accepted_per_position=list(self._accepted_per_position),
            mean_forward_width=_ratio(self._num_rows, self._num_rounds),
            seconds=seconds,
            tokens_per_second=_ratio(self._num_output_tokens, seconds),
            draft_seconds=self._draft_seconds,
            forward_seconds=self._forward_seconds,
            verify_seconds=self._verify_seconds,
            commit_seconds=self._commit_seconds,
            num_relaxed_tokens=self._num_relaxed_tokens,
            regret_spent=self._regret_spent,
            refusals=dict(self._refusals),
        )


def _ratio(amount: float, of: float) -> float:
    """`amount / of`, 0 when nothing was counted."""
    return amount / of if of else 0.0
