"""What lossy verification brings and what it costs, each against strict verification of the same drafts.

Speed comes from runs with a fixed number of tokens, quality from answers that end by themselves: a verifier
that makes answers longer would look faster in tokens per second, and one that cuts them short would look
better in seconds. The strict arm is measured first and last; lossy arms are held against both together, and
how far the two are apart says what a difference is worth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields, replace
from functools import partial

from paceline.bench.arms import STRICT, ArmName
from paceline.bench.intervals import Bootstrap, Interval
from paceline.bench.quality import repeated_ngrams
from paceline.bench.records import FIXED, NATURAL, GroupRecord, TurnRecord
from paceline.bench.rows import answers_of, complete_tables, is_lossy, strict_arm
from paceline.bench.tasks import Grader

ALL_SUITES = "all suites"
"""Name of the rows that join them."""
Amounts = list[float]
Table = Mapping[str, list[GroupRecord]]


@dataclass(frozen=True, slots=True)
class LossyRow:
    """One arm on one suite at one batch size; changes are against the strict arm that drafts alike.

    Attributes:
        suite: name of the suite, or `ALL_SUITES`.
        batch_size: prompts decoded at once.
        drafter: registered name.
        head: folder of its head, when one was named.
        verifier: as it was asked for.
        num_speculative_tokens: most drafted nodes a round, or `auto`.
        is_repeat: the strict arm's second run.
        num_prompts: prompts measured.
        tokens_per_second: on fixed work.
        speed_change: tokens per second over the strict ones' on fixed work; 1 is no change.
        accepted_per_round: drafted tokens kept a round, on fixed work.
        accepted_change: ratio of that to the strict ones'.
        verify_ms_per_token: milliseconds of verification per emitted token, on fixed work.
        relaxed_per_token: share of tokens, on fixed work, that are relaxed.
        refusals: share of rounds, on fixed work, that ended for each reason.
        log_prob: mean log-probability of a token under the target, of whole answers.
        log_prob_change: its difference to the strict ones'.
        regret_per_token: regret spent per token of whole answers.
        repetition: share of 4-grams that occurred before in the same answer.
        repetition_change: its difference.
        cut: share of answers that ended by their length.
        cut_change: its difference.
        differing: share of prompts whose answers are not the strict ones'.
        length_change: tokens of whole answers over the strict ones'.
        accuracy: share of tasks solved; None where the suite has no answers to compare with.
        accuracy_change: its difference.
    """

    suite: str
    batch_size: int
    drafter: str
    head: str | None
    verifier: str
    num_speculative_tokens: int | str | None
    is_repeat: bool
    num_prompts: int
    tokens_per_second: Interval | None
    speed_change: Interval | None
    accepted_per_round: Interval | None
    accepted_change: Interval | None
    verify_ms_per_token: Interval | None
    relaxed_per_token: Interval | None
    refusals: Mapping[str, float]
    log_prob: Interval | None
    log_prob_change: Interval | None
    regret_per_token: Interval | None
    repetition: Interval | None
    repetition_change: Interval | None
    cut: Interval | None
    cut_change: Interval | None
    differing: Interval | None
    length_change: Interval | None
    accuracy: Interval | None
    accuracy_change: Interval | None

    def as_dict(self) -> Mapping[str, object]:
        """Ready for JSON: intervals become objects."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: v.as_dict() if isinstance(v, Interval) else v for name, v in values.items()}


def lossy_rows(
    records: Iterable[GroupRecord], arms: Seq[ArmName], seed: int, graders: Mapping[str, Grader]
) -> list[LossyRow]:
    """A row for every lossy arm and for the strict ones that draft alike, by suite and over all suites.

    Args:
        records: of the whole run.
        arms: of the run.
        seed: of the intervals.
        graders: by suite; suites without one have no accuracy.
    """
    compared = {strict_arm(arm, arms) for arm in arms if is_lossy(arm)} - {None}
    drafting = [
        arm for arm in arms if (is_lossy(arm) or arm.verifier == STRICT) and strict_arm(arm, arms) in compared
    ]
    if not drafting:
        return []
    records = list(records)
    rows: list[LossyRow] = []
    once = [arm for arm in drafting if arm.repeat == 1]
    tables = zip(
        complete_tables(records, drafting, FIXED), complete_tables(records, once, NATURAL), strict=False
    )
    pairs = list(tables)
    for fixed, natural in [*pairs, *_over_all_suites(pairs)]:
        for arm in drafting:
            strict = strict_arm(arm, arms)
            if strict is not None:
                rows.append(_row(arm, strict, fixed, natural, seed, graders))
    return rows


def _over_all_suites(pairs: Seq[tuple[Table, Table]]) -> list[tuple[Table, Table]]:
    """The tables of each batch size joined, where there are several suites: what holds on average."""
    by_size: dict[int, list[tuple[Table, Table]]] = {}
    for fixed, natural in pairs:
        size = next(iter(fixed.values()))[0].key.batch_size
        by_size.setdefault(size, []).append((fixed, natural))
    return [
        (_joined([fixed for fixed, _ in found]), _joined([natural for _, natural in found]))
        for found in by_size.values()
        if len(found) > 1
    ]


def _joined(tables: Seq[Table]) -> Table:
    """Records of all suites under one name; prompts are told apart by their suite."""
    joined: dict[str, list[GroupRecord]] = {}
    for table in tables:
        for arm, records in table.items():
            joined.setdefault(arm, []).extend(_renamed(record) for record in records)
    return joined


def _renamed(record: GroupRecord) -> GroupRecord:
    """As a record of all suites."""
    prefix = record.key.suite
    turns = tuple(replace(turn, prompt_id=f"{prefix}/{turn.prompt_id}") for turn in record.turns)
    return replace(record, key=replace(record.key, suite=ALL_SUITES), turns=turns)


def _row(
    arm: ArmName,
    strict: ArmName,
    fixed: Mapping[str, list[GroupRecord]],
    natural: Mapping[str, list[GroupRecord]],
    seed: int,
    graders: Mapping[str, Grader],
) -> LossyRow:
    """The figures of one arm."""
    key = fixed[str(arm)][0].key
    own, base = fixed[str(arm)], _pooled(fixed, strict)
    timed = Bootstrap(len(own), seed)
    # Answers that end by themselves are the same whenever they are given; they are taken once.
    whole, whole_base = natural[str(replace(arm, repeat=1))], natural[str(strict)]
    judged = Bootstrap(len(whole), seed)
    grader = graders.get(key.suite)

    def change(count: Counter, of: Counter) -> Interval | None:
        return judged.difference(
            _sums(whole, count), _sums(whole, of), _sums(whole_base, count), _sums(whole_base, of)
        )

    def share(count: Counter, of: Counter) -> Interval | None:
        return judged.ratio(_sums(whole, count), _sums(whole, of))

    def solved(turn: TurnRecord) -> float:
        return float(grader is not None and grader.is_solved(turn.prompt_id, turn.token_ids))

    lengths, base_lengths = _sums(whole, _tokens), _sums(whole_base, _tokens)
    return LossyRow(
        suite=key.suite,
        batch_size=key.batch_size,
        drafter=arm.drafter,
        head=arm.head,
        verifier=arm.verifier,
        num_speculative_tokens=arm.num_speculative_tokens,
        is_repeat=arm.repeat > 1,
        num_prompts=len(answers_of(whole)),
        tokens_per_second=timed.ratio(_sums(own, _tokens), _seconds(own)),
        speed_change=timed.speed_up(
            _sums(own, _tokens), _seconds(own), *[_added(base, of) for of in (_token_sums, _seconds)]
        ),
        accepted_per_round=timed.ratio(_sums(own, _accepted), _sums(own, _rounds)),
        accepted_change=timed.speed_up(
            _sums(own, _accepted),
            _sums(own, _rounds),
            *[_added(base, partial(_sums, count=count)) for count in (_accepted, _rounds)],
        ),
        verify_ms_per_token=timed.ratio(_sums(own, _verify_ms), _sums(own, _tokens)),
        relaxed_per_token=timed.ratio(_sums(own, _relaxed), _sums(own, _tokens)),
        refusals=_refusal_shares(own),
        log_prob=share(_log_prob, _tokens),
        log_prob_change=change(_log_prob, _tokens),
        regret_per_token=share(_regret, _tokens),
        repetition=share(_repeated, _ngrams),
        repetition_change=change(_repeated, _ngrams),
        cut=share(_is_cut, _one),
        cut_change=change(_is_cut, _one),
        differing=judged.ratio(*_differing(whole, whole_base)),
        length_change=judged.speed_up(lengths, _sums(whole, _one), base_lengths, _sums(whole_base, _one)),
        accuracy=None if grader is None else share(solved, _one),
        accuracy_change=None if grader is None else change(solved, _one),
    )


Counter = Callable[[TurnRecord], float]


def _pooled(measured: Mapping[str, list[GroupRecord]], strict: ArmName) -> list[list[GroupRecord]]:
    """The strict arm's runs: the first and, where it was measured again, the last."""
    names = [str(strict), str(replace(strict, repeat=2))]
    return [measured[name] for name in names if name in measured]


def _added(runs: Seq[list[GroupRecord]], amounts_of: Callable[[list[GroupRecord]], Amounts]) -> Amounts:
    """Amounts of each group, summed over runs."""
    return [sum(parts) for parts in zip(*map(amounts_of, runs), strict=True)]


def _sums(records: Seq[GroupRecord], count: Counter) -> Amounts:
    """What is counted of each group's answers."""
    return [sum(map(count, record.turns)) for record in records]


def _token_sums(records: list[GroupRecord]) -> Amounts:
    return _sums(records, _tokens)


def _seconds(records: list[GroupRecord]) -> Amounts:
    return [record.seconds for record in records]


def _one(_: TurnRecord) -> float:
    return 1.0


def _tokens(turn: TurnRecord) -> float:
    return float(len(turn.token_ids))


def _log_prob(turn: TurnRecord) -> float:
    return float("nan") if turn.log_prob is None else turn.log_prob


def _is_cut(turn: TurnRecord) -> float:
    return float(bool(turn.is_cut))


def _repeated(turn: TurnRecord) -> float:
    return float(repeated_ngrams(turn.token_ids).num_repeated)


def _ngrams(turn: TurnRecord) -> float:
    return float(repeated_ngrams(turn.token_ids).num_ngrams)


def _rounds(turn: TurnRecord) -> float:
    return float(turn.statistics.num_rounds) if turn.statistics else 0.0


def _accepted(turn: TurnRecord) -> float:
    return float(turn.statistics.num_accepted_tokens) if turn.statistics else 0.0


def _relaxed(turn: TurnRecord) -> float:
    return float(turn.statistics.num_relaxed_tokens) if turn.statistics else 0.0


def _regret(turn: TurnRecord) -> float:
    return turn.statistics.regret_spent if turn.statistics else 0.0


def _verify_ms(turn: TurnRecord) -> float:
    return 1000 * turn.statistics.verify_seconds if turn.statistics else 0.0


def _refusal_shares(records: Seq[GroupRecord]) -> dict[str, float]:
    """How often a path ended for each reason, of all rounds."""
    counts: dict[str, int] = {}
    for record in records:
        for turn in record.turns:
            for reason, count in (turn.statistics.refusals if turn.statistics else {}).items():
                counts[reason] = counts.get(reason, 0) + count
    total = sum(counts.values())
    return {reason: count / total for reason, count in sorted(counts.items())}


def _differing(own: Seq[GroupRecord], base: Seq[GroupRecord]) -> tuple[Amounts, Amounts]:
    """Prompts of each group whose answers, in any turn, are not those of the strict arm; and all prompts."""
    expected = answers_of(base)
    differ: Amounts = []
    asked: Amounts = []
    for record in own:
        answers = answers_of([record])
        asked.append(len(answers))
        differ.append(
            sum(
                [turn.token_ids for turn in turns] != [turn.token_ids for turn in expected[prompt_id]]
                for prompt_id, turns in answers.items()
            )
        )
    return differ, asked
