"""Lossy verification against strict: speed from fixed work, quality from natural ends, both paired."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench_fakes import statistics
from paceline.bench.arms import ArmName
from paceline.bench.lossy_report import lossy_lines
from paceline.bench.lossy_rows import lossy_rows
from paceline.bench.records import FIXED, NATURAL, GroupRecord, RecordKey, TurnRecord

STRICT = ArmName("phrase", "greedy", 48)
AGAIN = replace(STRICT, repeat=2)
LOSSY = ArmName("phrase", "budgeted:stable", 48)
PLAIN = ArmName("none")
ARMS = [PLAIN, STRICT, LOSSY, AGAIN]


def one(arm, group, token_ids, seconds, work, *, log_prob=None, is_cut=False, **counts):
    counted = replace(statistics(rounds=10, tokens=len(token_ids), accepted=5), **counts)
    turn = TurnRecord(f"p{group}", 0, (1,), tuple(token_ids), counted, log_prob, is_cut)
    return GroupRecord(RecordKey("own", 1, group, str(arm), work), seconds, (turn,))


def records():
    """Two prompts: the lossy arm is a tenth faster than both strict runs, and its text differs once."""
    found = []
    for group in range(2):
        tokens = range(20)
        found += [
            one(STRICT, group, tokens, 1.0, FIXED, num_accepted_tokens=10),
            one(
                LOSSY,
                group,
                tokens,
                1.0,
                FIXED,
                num_accepted_tokens=12,
                num_relaxed_tokens=2,
                refusals={"gate": 6, "leaf": 2},
            ),
            one(AGAIN, group, tokens, 1.2, FIXED, num_accepted_tokens=10),
            one(STRICT, group, [1, 2, 3, 4], 9.0, NATURAL, log_prob=-4.0),
            one(
                LOSSY,
                group,
                [1, 2, 3, 4] if group else [1, 2, 3, 4] * 2,
                9.0,
                NATURAL,
                log_prob=-4.0 if group else -12.0,
                is_cut=not group,
                regret_spent=0.0 if group else 3.0,
            ),
            one(PLAIN, group, [1, 2, 3, 4], 9.0, NATURAL, log_prob=-4.0),
        ]
    return found


def test_several_suites_are_joined_too():
    """Twice the same suite under two names: the same figures, and twice the prompts."""
    found = records()
    other = [replace(r, key=replace(r.key, suite="other")) for r in found]
    rows = lossy_rows([*found, *other], ARMS, 0, {})
    assert [row.suite for row in rows] == ["own"] * 3 + ["other"] * 3 + ["all suites"] * 3
    own, joined = rows[1], rows[7]
    assert (own.num_prompts, joined.num_prompts) == (2, 4)
    assert joined.speed_change.value == pytest.approx(own.speed_change.value)
    assert joined.log_prob_change.value == pytest.approx(own.log_prob_change.value)
    assert joined.differing.value == own.differing.value == 0.5
    assert len(lossy_rows(found, ARMS, 0, {})) == 3


class EvenGrader:
    """Solves the prompt with the even number."""

    def is_solved(self, prompt_id, token_ids):
        return prompt_id == "p0" and len(token_ids) == 8


def test_speed_is_held_against_both_strict_runs_and_quality_against_the_first():
    strict, lossy, again = lossy_rows(records(), ARMS, 0, {"own": EvenGrader()})
    assert [row.verifier for row in (strict, lossy, again)] == ["greedy", "budgeted:stable", "greedy"]
    assert (strict.is_repeat, again.is_repeat) == (False, True)
    assert lossy.speed_change.value == pytest.approx(1.1)
    assert strict.speed_change.value == pytest.approx(1.1)
    assert again.speed_change.value == pytest.approx(1.1 / 1.2)
    assert lossy.tokens_per_second.value == pytest.approx(20.0)
    assert lossy.accepted_per_round.value == pytest.approx(1.2)
    assert lossy.accepted_change.value == pytest.approx(1.2)
    assert lossy.relaxed_per_token.value == pytest.approx(0.1)
    assert lossy.verify_ms_per_token.value == pytest.approx(0.5)
    assert lossy.refusals == {"gate": 0.75, "leaf": 0.25}
    # 16 of 12 tokens' log-probability against 8 of 8.
    assert lossy.log_prob.value == pytest.approx(-16 / 12)
    assert lossy.log_prob_change.value == pytest.approx(-16 / 12 + 1)
    assert lossy.regret_per_token.value == pytest.approx(3 / 12)
    assert lossy.repetition.value == pytest.approx(1 / 6)
    assert lossy.repetition_change.value == pytest.approx(1 / 6)
    assert (lossy.cut.value, lossy.cut_change.value) == (0.5, 0.5)
    assert lossy.differing.value == 0.5
    assert lossy.length_change.value == pytest.approx(1.5)
    assert (lossy.accuracy.value, lossy.accuracy_change.value) == (0.5, 0.5)
    assert (strict.differing.value, strict.log_prob_change.value, strict.accuracy.value) == (0.0, 0.0, 0.0)


def test_changes_have_paired_intervals():
    """The change of a figure that differs on one of two prompts lies between that and nothing."""
    _, lossy, _ = lossy_rows(records(), ARMS, 0, {})
    assert lossy.cut_change.low == 0.0
    assert lossy.cut_change.high == 1.0
    assert lossy.accuracy is None


def test_without_lossy_arms_there_are_no_rows():
    strict = [record for record in records() if record.key.arm != str(LOSSY)]
    assert lossy_rows(strict, [PLAIN, STRICT], 0, {}) == []


def test_prompts_that_an_arm_has_not_finished_are_left_out():
    some = [
        r for r in records() if not (r.key.arm == str(LOSSY) and r.key.group == 1 and r.key.work == FIXED)
    ]
    assert {row.num_prompts for row in lossy_rows(some, ARMS, 0, {})} == {2}
    assert lossy_rows(some, ARMS, 0, {})[1].speed_change.value == pytest.approx(1.1)


def test_speed_and_quality_are_reported_apart():
    text = "\n".join(lossy_lines(lossy_rows(records(), ARMS, 0, {"own": EvenGrader()})))
    speed, quality = text.split("## Quality on natural ends")
    assert "## Speed on fixed work: own, batch 1, 2 prompts" in speed
    assert "| phrase | greedy, again | 48 |" in speed
    assert "gate 75, leaf 25" in speed
    assert "budgeted:stable" in quality
    assert ", again" not in quality
    assert lossy_lines([]) == []
