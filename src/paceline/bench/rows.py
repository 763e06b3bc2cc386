"""From records to the rows of a report: speed, speed-up, acceptance and where the time of a round goes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields, replace
from typing import Any

from paceline.bench.arms import PLAIN, STRICT, ArmName
from paceline.bench.intervals import Bootstrap, Interval
from paceline.bench.records import NATURAL, GroupRecord, TurnRecord
from paceline.bench.verifier_specs import VerifierSpec
from paceline.engine.stats import GenerationStatistics

REFERENCE = "hf_generate"
_UNTIMED: dict[str, Any] = dict.fromkeys(
    (
        "tokens_per_second", "speedup_vs_hf_generate", "speedup_vs_none", "draft_ms_per_round",
        "forward_ms_per_round", "verify_ms_per_round", "commit_ms_per_round", "host_ms_per_round", "round_ms",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ResultRow:
    """One arm on one suite at one batch size. Figures about rounds are None for baselines.

    Attributes:
        suite: name of the suite.
        drafter: registered name, or a baseline's.
        verifier: registered name.
        batch_size: prompts decoded at once.
        num_speculative_tokens: most drafted nodes a round, or `auto`.
        head: folder of the head when one was named.
        num_prompts: prompts measured.
        num_output_tokens: tokens emitted on them.
        tokens_per_second: emitted tokens over wall time, prompts included.
        speedup_vs_hf_generate: ratio to Hugging Face `generate()` on the same prompts.
        speedup_vs_none: ratio to this engine without drafting, same verifier.
        mean_acceptance_length: tokens a round, the target's own included.
        accepted_per_round: drafted tokens kept a round.
        draft_ms_per_round: milliseconds in the drafter.
        forward_ms_per_round: milliseconds in the target's forward, its output layer included.
        verify_ms_per_round: milliseconds in processors and verifier.
        commit_ms_per_round: milliseconds in which kept tokens were added to sequence, cache and drafter.
        host_ms_per_round: what remains of the answer's time: bookkeeping between and around these and, in
            batches, waiting for the prompts of others.
        round_ms: milliseconds of a whole round (of the batch).
        mean_forward_width: tree rows of a forward and sequence, root included.
        identical_fraction: share of prompts whose ids equal the reference's.
        identical_to_none: share of prompts whose ids equal those of this engine without drafting (same
            verifier): 1 in fp32 and, in any dtype, on the fast path.
    """

    suite: str
    drafter: str
    verifier: str
    batch_size: int
    num_speculative_tokens: int | str | None
    head: str | None
    num_prompts: int
    num_output_tokens: int
    tokens_per_second: Interval | None
    speedup_vs_hf_generate: Interval | None
    speedup_vs_none: Interval | None
    mean_acceptance_length: Interval | None
    accepted_per_round: Interval | None
    draft_ms_per_round: float | None
    forward_ms_per_round: float | None
    verify_ms_per_round: float | None
    commit_ms_per_round: float | None
    host_ms_per_round: float | None
    round_ms: float | None
    mean_forward_width: float | None
    identical_fraction: float | None
    identical_to_none: float | None = None

    def as_dict(self) -> Mapping[str, object]:
        """Ready for JSON: intervals become objects."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: v.as_dict() if isinstance(v, Interval) else v for name, v in values.items()}


def result_rows(records: Iterable[GroupRecord], arms: Seq[ArmName], seed: int) -> list[ResultRow]:
    """A row per suite, batch size and arm, in the order of the records and of `arms`.

    Of answers that end by themselves; where lossy verifiers take part, those are not timed.
    """
    is_timed = not any(map(is_lossy, arms))
    rows: list[ResultRow] = []
    # What is measured twice is fixed work.
    once = [arm for arm in arms if arm.repeat == 1]
    for measured in complete_tables(records, once, NATURAL):
        bootstrap = Bootstrap(len(measured[str(once[0])]), seed)
        found = [_row(arm, once, measured, bootstrap) for arm in once]
        rows += found if is_timed else [replace(row, **_UNTIMED) for row in found]
    return rows


def complete_tables(
    records: Iterable[GroupRecord], arms: Seq[ArmName], work: str
) -> Iterator[dict[str, list[GroupRecord]]]:
    """For every suite and batch size the records of each arm: of groups that all of them have finished.

    A ratio must compare the same prompts.
    """
    by_table: dict[tuple[str, int], dict[str, dict[int, GroupRecord]]] = {}
    for record in records:
        if record.key.work == work:
            table = by_table.setdefault((record.key.suite, record.key.batch_size), {})
            table.setdefault(record.key.arm, {})[record.key.group] = record
    for table in by_table.values():
        groups = sorted(set.intersection(*(set(table.get(str(arm), {})) for arm in arms)))
        if groups:
            yield {str(arm): [table[str(arm)][group] for group in groups] for arm in arms}


def reference_arm(arm: ArmName, arms: Seq[ArmName]) -> ArmName | None:
    """Whose ids an arm's are compared with.

    Hugging Face's for strict ones, else those without drafting; for lossy ones those of the strict arm that
    drafts alike.
    """
    if is_lossy(arm):
        return strict_arm(arm, arms)
    plain = next((a for a in arms if a.drafter == PLAIN and a.verifier == arm.verifier), None)
    hugging_face = next((a for a in arms if a.drafter == REFERENCE and arm.verifier == "greedy"), None)
    found = hugging_face or plain
    return None if found == arm else found


def is_lossy(arm: ArmName) -> bool:
    """Whether the arm's verifier may change the text."""
    return VerifierSpec.read(arm.verifier).is_lossy


def strict_arm(arm: ArmName, arms: Seq[ArmName]) -> ArmName | None:
    """The arm that drafts as this one does and verifies strictly."""
    alike = replace(arm, verifier=STRICT, repeat=1)
    return alike if alike in arms else None


def answers_of(records: Iterable[GroupRecord]) -> dict[str, list[TurnRecord]]:
    """Prompt id -> its turns in order."""
    answers: dict[str, list[TurnRecord]] = {}
    for record in records:
        for turn in record.turns:
            answers.setdefault(turn.prompt_id, []).append(turn)
    return answers


def _row(
    arm: ArmName, arms: Seq[ArmName], measured: Mapping[str, list[GroupRecord]], bootstrap: Bootstrap
) -> ResultRow:
    """The figures of one arm."""
    own = measured[str(arm)]
    tokens, seconds = _tokens(own), _seconds(own)
    statistics = [[t.statistics for t in record.turns if t.statistics is not None] for record in own]
    rounds = [float(sum(s.num_rounds for s in group)) for group in statistics]
    accepted = [float(sum(s.num_accepted_tokens for s in group)) for group in statistics]
    counted = [s for group in statistics for s in group]

    def speed_up(base: ArmName | None) -> Interval | None:
        if base is None:
            return None
        others = measured[str(base)]
        return bootstrap.speed_up(tokens, seconds, _tokens(others), _seconds(others))

    verifier = STRICT if is_lossy(arm) else arm.verifier
    plain = next((a for a in arms if a.drafter == PLAIN and a.verifier == verifier), None)
    return ResultRow(
        suite=own[0].key.suite,
        drafter=arm.drafter,
        verifier=arm.verifier,
        batch_size=own[0].key.batch_size,
        num_speculative_tokens=arm.num_speculative_tokens,
        head=arm.head,
        num_prompts=len(answers_of(own)),
        num_output_tokens=sum(record.num_tokens for record in own),
        tokens_per_second=bootstrap.ratio(tokens, seconds),
        speedup_vs_hf_generate=speed_up(next((a for a in arms if a.drafter == REFERENCE), None)),
        speedup_vs_none=speed_up(plain),
        mean_acceptance_length=bootstrap.ratio(tokens, rounds) if counted else None,
        accepted_per_round=bootstrap.ratio(accepted, rounds) if counted else None,
        draft_ms_per_round=_per_round(counted, [s.draft_seconds for s in counted], 1000),
        forward_ms_per_round=_per_round(counted, [s.forward_seconds for s in counted], 1000),
        verify_ms_per_round=_per_round(counted, [s.verify_seconds for s in counted], 1000),
        commit_ms_per_round=_per_round(counted, [s.commit_seconds for s in counted], 1000),
        host_ms_per_round=_per_round(counted, [s.seconds - _round_seconds(s) for s in counted], 1000),
        round_ms=_per_round(counted, [_round_seconds(s) for s in counted], 1000),
        mean_forward_width=_per_round(counted, [s.mean_forward_width * s.num_rounds for s in counted], 1),
        identical_fraction=_identical_fraction(own, measured, reference_arm(arm, arms)),
        identical_to_none=_identical_fraction(own, measured, plain) if arm.drafter != REFERENCE else None,
    )


def _tokens(records: Seq[GroupRecord]) -> list[float]:
    """Emitted tokens of each group."""
    return [float(record.num_tokens) for record in records]


def _seconds(records: Seq[GroupRecord]) -> list[float]:
    """Wall time of each group."""
    return [record.seconds for record in records]


def _round_seconds(statistics: GenerationStatistics) -> float:
    """Time of all rounds of one answer."""
    return (
        statistics.draft_seconds
        + statistics.forward_seconds
        + statistics.verify_seconds
        + statistics.commit_seconds
    )


def _per_round(counted: Seq[GenerationStatistics], amounts: Seq[float], scale: float) -> float | None:
    """Mean amount of a round."""
    num_rounds = sum(statistics.num_rounds for statistics in counted)
    return scale * sum(amounts) / num_rounds if num_rounds else None


def _identical_fraction(
    own: Seq[GroupRecord], measured: Mapping[str, list[GroupRecord]], reference: ArmName | None
) -> float | None:
    """Share of prompts all of whose turns have the reference's ids."""
    if reference is None:
        return None
    answers, expected = answers_of(own), answers_of(measured[str(reference)])
    same = [_ids(turns) == _ids(expected[prompt_id]) for prompt_id, turns in answers.items()]
    return sum(same) / len(same)


def _ids(turns: Seq[TurnRecord]) -> list[tuple[int, ...]]:
    """Emitted ids turn by turn."""
    return [turn.token_ids for turn in turns]
