"""Records and arms of known content, for tests of the benchmark's bookkeeping."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.bench.arms import ArmAnswer, ArmName
from paceline.bench.records import GroupRecord, RecordKey, TurnRecord
from paceline.engine.stats import GenerationStatistics


def statistics(*, rounds: int, tokens: int, drafted: int = 0, accepted: int = 0, width: float = 1.0):
    """Counts as given; a round takes 1 ms of drafting, 7 of forward, 1 of verifying and 1 of committing."""
    return GenerationStatistics(
        num_rounds=rounds,
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        num_output_tokens=tokens,
        mean_acceptance_length=tokens / rounds,
        accepted_per_round=accepted / rounds,
        acceptance_rate=accepted / drafted if drafted else 0.0,
        accepted_per_position=[accepted],
        mean_forward_width=width,
        seconds=0.0105 * rounds,
        tokens_per_second=tokens / (0.01 * rounds),
        draft_seconds=0.001 * rounds,
        forward_seconds=0.007 * rounds,
        verify_seconds=0.001 * rounds,
        commit_seconds=0.001 * rounds,
    )


def record(
    arm: ArmName,
    group: int,
    token_ids: Sequence[int],
    seconds: float,
    *,
    counts: GenerationStatistics | None = None,
    suite: str = "builtin",
    prompt_ids: Sequence[int] = (5, 6),
    turn: int = 0,
) -> GroupRecord:
    """One prompt answered by one arm."""
    answer = TurnRecord(f"p{group}", turn, tuple(prompt_ids), tuple(token_ids), counts)
    return GroupRecord(RecordKey(suite, 1, group, str(arm)), seconds, (answer,))


class FakeArm:
    """Answers with fixed ids and notes what it was asked."""

    def __init__(
        self, drafter: str, token_ids: Sequence[int] = (7, 8, 9), text: str = "xyz", on_answer=lambda: None
    ):
        self.name = ArmName(drafter)
        self.token_ids = tuple(token_ids)
        self.text = text
        self.on_answer = on_answer
        self.asked: list[tuple[tuple[tuple[int, ...], ...], int]] = []

    def answer(self, prompts, max_new_tokens):
        self.on_answer()
        self.asked.append((tuple(tuple(ids) for ids in prompts), max_new_tokens))
        return [ArmAnswer(self.token_ids, self.text) for _ in prompts]
