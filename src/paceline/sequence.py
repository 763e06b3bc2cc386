"""One request being decoded: its ids, its limits, and the rule that trims what a verifier accepted.

`Sequence.accept` is the only place where tokens are added, so end-of-sequence ids, stop strings,
`max_new_tokens` and the context limit act at token granularity whatever the size of an accepted block; the
cache, the drafters, the statistics and the stream all see the trimmed result only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from paceline.errors import RequestError
from paceline.sampling import SamplingParameters
from paceline.tree import DraftTree

FinishReason = Literal["stop", "length"]
Refused = Literal["leaf", "gate", "budget", "cap", "banned", "end_of_text", "threshold", "price"]
"""Why a path ends where it does: nothing is drafted behind it (`leaf`), what refused the best node, or that
going on was not worth its regret (`price`)."""


@dataclass(frozen=True, slots=True)
class TokenLogProb:
    """Log-probability of one emitted token under the target, unprocessed and untempered.

    Attributes:
        token_id: the emitted token.
        log_prob: its log-probability.
        top: id -> log-probability of the likeliest tokens at that position.
    """

    token_id: int
    log_prob: float
    top: dict[int, float]


@dataclass(frozen=True, slots=True)
class RelaxedToken:
    """An accepted token that is not the target's choice.

    Attributes:
        place: its index among the accepted tokens of its round.
        regret: largest logit at its position minus its own; 0 for one of several equal ones.
    """

    place: int
    regret: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """Where and why a lossy verifier ended the path.

    Attributes:
        reason: see `Refused`.
        regret: of the refused node, the least among its siblings; NaN behind a leaf.
        value: its suffix value under the rule; NaN likewise, and where the rule has none.
    """

    reason: Refused
    regret: float = math.nan
    value: float = math.nan


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What a verifier kept of one draft tree.

    Attributes:
        path: accepted tree nodes below the root, parents first; empty when nothing was accepted.
        accepted_ids: their tokens.
        next_token_id: the target's own token after the path (recovered after a rejection, bonus after a full
            path);
            None once `Sequence.accept` has trimmed it away.
        relaxed: accepted tokens that are not the target's choice, in order; lossy verifiers only.
        refusal: why the path ends; lossy verifiers only, and not where a stop cut it short.
    """

    path: tuple[int, ...]
    accepted_ids: tuple[int, ...]
    next_token_id: int | None
    relaxed: tuple[RelaxedToken, ...] = ()
    refusal: Refusal | None = None

    @property
    def num_relaxed(self) -> int:
        """Accepted tokens that are not the target's choice."""
        return len(self.relaxed)

    @property
    def charge(self) -> float:
        """Regret spent on them, in logits."""
        return math.fsum(token.regret for token in self.relaxed)

    @property
    def emitted_ids(self) -> tuple[int, ...]:
        """Tokens this round adds to the sequence."""
        return self.accepted_ids if self.next_token_id is None else (*self.accepted_ids, self.next_token_id)

    @property
    def rows(self) -> tuple[int, ...]:
        """Tree nodes whose logits produced each emitted token: the root, then the path."""
        return (0, *self.path)[: len(self.emitted_ids)]

    def trimmed(self, num_tokens: int) -> VerifyResult:
        """The first `num_tokens` emitted tokens of this result."""
        if num_tokens >= len(self.emitted_ids):
            return self
        return replace(
            self,
            path=self.path[:num_tokens],
            accepted_ids=self.accepted_ids[:num_tokens],
            next_token_id=None,
            relaxed=tuple(token for token in self.relaxed if token.place < num_tokens),
            refusal=None,
        )


@dataclass(eq=False, slots=True)
class Sequence:
    """Decoding state of one request. Hash and equality are by identity.

    Attributes:
        prompt_ids: prompt tokens, at least one.
        parameters: the request's parameters.
        eos_token_ids: ids that end the text (resolved: never None).
        context_len: most tokens, prompt included, that the target can hold.
        seed: key of the request's randomness (resolved).
        max_draft_tokens: most drafted nodes a round; None leaves it to the engine.
        find_stop: called with the emitted ids; returns how many of them to keep when a stop string is
            complete,
            None otherwise. Absent without stop strings.
        output_ids: emitted tokens.
        finish_reason: None while running.
        log_probs: one entry per emitted token when asked for.
        regret_spent: of all relaxed tokens that were emitted, in logits: the ledger of budgeted verification.
        error: why the engine let go of it unfinished: a grammar that cannot be followed any further.
    """

    prompt_ids: list[int]
    parameters: SamplingParameters
    eos_token_ids: frozenset[int]
    context_len: int
    seed: int
    find_stop: Callable[[list[int], int], int | None] | None = None
    max_draft_tokens: int | None = None
    output_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    log_probs: list[TokenLogProb] = field(default_factory=list)
    regret_spent: float = 0.0
    error: RequestError | None = None

    def __post_init__(self) -> None:
        """Refuse prompts that leave no room for a token."""
        if not self.prompt_ids:
            raise RequestError(
                "the prompt has 0 tokens: give at least one (this tokenizer adds no start token)"
            )
        if len(self.prompt_ids) >= self.context_len:
            raise RequestError(
                f"the prompt has {len(self.prompt_ids)} tokens and the target's context is "
                f"{self.context_len}: at most {self.context_len - 1} leave room for an answer"
            )

    def __len__(self) -> int:
        """Committed tokens: prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def token_ids(self) -> list[int]:
        """Committed tokens, prompt first (a new list)."""
        return self.prompt_ids + self.output_ids

    @property
    def last_token_id(self) -> int:
        """The newest committed token: the root of the next draft tree."""
        return self.output_ids[-1] if self.output_ids else self.prompt_ids[-1]

    @property
    def is_finished(self) -> bool:
        """Whether no more tokens will be added."""
        return self.finish_reason is not None or self.error is not None

    @property
    def room(self) -> int:
        """Tokens that may still be emitted before `max_new_tokens` or the context limit."""
        room = self.context_len - len(self)
        if self.parameters.max_new_tokens is not None:
            room = min(room, self.parameters.max_new_tokens - len(self.output_ids))
        return room

    def accept(self, result: VerifyResult) -> VerifyResult:
        """Add the tokens of `result`, trimmed at the first stop condition; sets `finish_reason`.

        Only what is added is charged to the ledger, not what a stop cuts off.

        Returns:
            The trimmed result: exactly the tokens that were added.
        """
        ids = result.emitted_ids
        keep, reason = len(ids), None
        if keep >= self.room:
            keep, reason = self.room, "length"
        if not self.parameters.ignore_eos:
            hit = next((i for i, token_id in enumerate(ids[:keep]) if token_id in self.eos_token_ids), None)
            if hit is not None:
                keep, reason = hit + 1, "stop"
        num_before = len(self.output_ids)
        self.output_ids.extend(ids[:keep])
        if self.find_stop is not None:
            stopped = self.find_stop(self.output_ids, num_before)
            if stopped is not None and stopped <= len(self.output_ids):
                del self.output_ids[stopped:]
                keep, reason = stopped - num_before, "stop"
        self.finish_reason = reason  # type: ignore[assignment]
        trimmed = result.trimmed(keep)
        self.regret_spent += trimmed.charge
        return trimmed


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of one sequence that enter the next forward: a committed prefix, then a draft tree.

    Attributes:
        sequence: whose tokens they are.
        prefix_ids: committed tokens that are not in the cache yet (a prompt chunk); empty in a decoding
            round.
        tree: draft tree whose root follows the prefix; None for a prompt chunk that is not the last.
    """

    sequence: Sequence
    prefix_ids: tuple[int, ...]
    tree: DraftTree | None

    def __len__(self) -> int:
        """Rows this segment takes in the forward."""
        return len(self.prefix_ids) + (0 if self.tree is None else len(self.tree))
