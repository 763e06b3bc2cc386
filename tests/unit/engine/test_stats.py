"""Statistics count emitted tokens and verified drafts, nothing else."""

from __future__ import annotations

import json

import pytest

from paceline.engine.stats import RoundTiming, StatisticsRecorder
from paceline.sequence import Refusal, RelaxedToken, VerifyResult
from paceline.tree import DraftTree

TIMING = RoundTiming(0.01, 0.04, 0.02, 0.03, num_sequences=1, num_rows=5)


def ticking_clock():
    """A clock that advances by one second whenever it is read."""
    now = iter(range(1000))
    return lambda: float(next(now))


def record(rounds) -> StatisticsRecorder:
    recorder = StatisticsRecorder(ticking_clock())
    for num_drafted, num_accepted in rounds:
        tree = DraftTree.from_chain(1, list(range(num_drafted)))
        path = tuple(range(1, num_accepted + 1))
        recorder.record(tree, VerifyResult(path, tuple(range(num_accepted)), 9), TIMING)
    return recorder


def test_rejection_ends_the_count_of_a_round():
    # Four drafted, the third wrong: two accepted and the correction.
    statistics = record([(4, 2)] * 10).finish()
    assert statistics.acceptance_rate == 0.5
    assert statistics.mean_acceptance_length == 3
    assert statistics.accepted_per_round == 2
    assert statistics.accepted_per_position == [10, 10]
    assert (statistics.num_draft_tokens, statistics.num_accepted_tokens) == (40, 20)
    assert (statistics.num_output_tokens, statistics.num_rounds) == (30, 10)


def test_right_drafts_behind_a_wrong_one_do_not_count():
    # Right at 0 and 2, wrong at 1 and 3: the verifier keeps one.
    statistics = record([(4, 1)] * 10).finish()
    assert statistics.acceptance_rate == 0.25
    assert statistics.mean_acceptance_length == 2


def test_trimmed_round_counts_what_was_emitted():
    recorder = StatisticsRecorder(ticking_clock())
    full = VerifyResult((1, 2, 3), (5, 6, 7), 8)
    recorder.record(DraftTree.from_chain(1, [5, 6, 7]), full.trimmed(2), TIMING)
    statistics = recorder.finish()
    assert (statistics.num_accepted_tokens, statistics.num_output_tokens) == (2, 2)
    assert statistics.accepted_per_position == [1, 1]


def test_positions_count_rounds_that_reached_them():
    assert record([(3, 0), (3, 3), (3, 1)]).finish().accepted_per_position == [2, 1, 1]


def test_tree_width_includes_the_root():
    statistics = record([(4, 1), (0, 0)]).finish()
    assert statistics.mean_forward_width == 3
    assert statistics.acceptance_rate == 0.25


def test_times_add_up_and_speed_is_of_emitted_tokens():
    statistics = record([(4, 2)] * 2).finish()
    assert statistics.seconds == 2
    assert statistics.tokens_per_second == 3
    assert statistics.draft_seconds == pytest.approx(0.02)
    assert statistics.forward_seconds == pytest.approx(0.08)
    assert statistics.verify_seconds == pytest.approx(0.04)
    assert statistics.commit_seconds == pytest.approx(0.06)


def test_plain_decoding_has_rate_zero_and_length_one():
    statistics = record([(0, 0)] * 5).finish()
    assert (statistics.acceptance_rate, statistics.mean_acceptance_length) == (0, 1)


def test_request_without_rounds_has_zeros():
    statistics = record([]).finish()
    assert (statistics.num_rounds, statistics.mean_acceptance_length, statistics.tokens_per_second) == (
        0,
        0,
        0,
    )


def test_statistics_go_through_json():
    statistics = record([(4, 2)]).finish()
    restored = json.loads(json.dumps(statistics.as_dict()))
    assert restored["accepted_per_position"] == [1, 1]
    assert restored == statistics.as_dict()
    assert len(restored) == 18


def test_relaxed_tokens_their_regret_and_the_reasons_are_added_up():
    recorder = record([(4, 2)])
    tree = DraftTree.from_chain(1, [5, 6, 7])
    relaxed = (RelaxedToken(0, 0.5), RelaxedToken(1, 0.25))
    for refusal in (Refusal("gate", 1.0, 2.0), Refusal("leaf"), Refusal("gate", 0.5, 1.0)):
        recorder.record(tree, VerifyResult((1, 2), (5, 6), 8, relaxed, refusal), TIMING)
    statistics = recorder.finish()
    assert (statistics.num_relaxed_tokens, statistics.regret_spent) == (6, 2.25)
    assert statistics.refusals == {"gate": 2, "leaf": 1}


def test_earlier_snapshot_is_not_changed_by_later_rounds():
    recorder = record([(4, 2)])
    before = recorder.finish()
    recorder.record(DraftTree.from_chain(1, [5]), VerifyResult((1,), (5,), 6), TIMING)
    assert before.accepted_per_position == [1, 1]
    assert recorder.finish().accepted_per_position == [2, 1]
