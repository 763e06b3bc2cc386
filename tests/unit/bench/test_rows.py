"""Figures of a report, from records of known content."""

from __future__ import annotations

import pytest

from bench_fakes import record, statistics
from paceline.bench.arms import ArmName
from paceline.bench.intervals import Interval
from paceline.bench.records import GroupRecord, RecordKey, TurnRecord
from paceline.bench.rows import reference_arm, result_rows

HF, NONE, PHRASE = ArmName("hf_generate"), ArmName("none"), ArmName("phrase", "greedy", 8)
ARMS = [HF, NONE, PHRASE]


def records_of(arm, seconds, *, ids=((7, 8, 9, 10), (7, 8)), counts=(None, None)):
    return [record(arm, group, ids[group], seconds[group], counts=counts[group]) for group in range(2)]


@pytest.fixture
def rows():
    plain = (statistics(rounds=4, tokens=4), statistics(rounds=2, tokens=2))
    drafted = (
        statistics(rounds=2, tokens=4, drafted=12, accepted=2, width=7.0),
        statistics(rounds=1, tokens=2, drafted=8, accepted=1, width=9.0),
    )
    records = [
        *records_of(HF, (4.0, 2.0)),
        *records_of(NONE, (3.0, 1.0), counts=plain),
        *records_of(PHRASE, (1.0, 0.5), ids=((7, 8, 9, 10), (7, 1)), counts=drafted),
    ]
    return {row.drafter: row for row in result_rows(records, ARMS, seed=0)}


def test_speed_is_emitted_tokens_over_wall_time(rows):
    assert rows["hf_generate"].tokens_per_second.value == pytest.approx(6 / 6.0)
    assert rows["phrase"].tokens_per_second.value == pytest.approx(6 / 1.5)
    assert rows["phrase"].num_output_tokens == 6


def test_speed_ups_compare_tokens_per_second_on_the_same_prompts(rows):
    assert rows["phrase"].speedup_vs_hf_generate.value == pytest.approx(4.0)
    assert rows["phrase"].speedup_vs_none.value == pytest.approx((6 / 1.5) / (6 / 4.0))
    assert rows["none"].speedup_vs_none == Interval(1.0, 1.0, 1.0)


def test_acceptance_is_counted_with_and_without_the_bonus(rows):
    assert rows["phrase"].mean_acceptance_length.value == pytest.approx(6 / 3)
    assert rows["phrase"].accepted_per_round.value == pytest.approx(3 / 3)
    assert rows["none"].mean_acceptance_length.value == pytest.approx(1.0)
    assert rows["none"].accepted_per_round.value == 0


def test_times_and_widths_are_means_over_rounds(rows):
    assert rows["phrase"].draft_ms_per_round == pytest.approx(1.0)
    assert rows["phrase"].forward_ms_per_round == pytest.approx(7.0)
    assert rows["phrase"].verify_ms_per_round == pytest.approx(1.0)
    assert rows["phrase"].commit_ms_per_round == pytest.approx(1.0)
    assert rows["phrase"].host_ms_per_round == pytest.approx(0.5)
    assert rows["phrase"].round_ms == pytest.approx(10.0)
    assert rows["phrase"].mean_forward_width == pytest.approx((2 * 7 + 9) / 3)


def test_baselines_have_no_figures_about_rounds(rows):
    row = rows["hf_generate"]
    assert (
        row.mean_acceptance_length is row.accepted_per_round is row.round_ms is row.mean_forward_width is None
    )


def test_identical_fraction_counts_prompts_with_the_references_ids(rows):
    assert rows["none"].identical_fraction == 1.0
    assert rows["phrase"].identical_fraction == 0.5
    assert rows["hf_generate"].identical_fraction is None


def test_answers_are_compared_with_plain_decoding_as_well(rows):
    assert rows["none"].identical_to_none == 1.0
    assert rows["phrase"].identical_to_none == 0.5
    assert rows["hf_generate"].identical_to_none is None


def test_a_prompt_counts_as_identical_only_if_all_its_turns_are():
    def two_turns(arm, last):
        turns = tuple(TurnRecord("p", turn, (5,), (7, last if turn else 8), None) for turn in range(2))
        return GroupRecord(RecordKey("builtin", 1, 0, str(arm)), 1.0, turns)

    rows = result_rows([two_turns(HF, 9), two_turns(NONE, 10)], [HF, NONE], seed=0)
    assert [row.identical_fraction for row in rows] == [None, 0.0]
    assert rows[0].num_prompts == 1


def test_groups_that_an_arm_has_not_finished_are_left_out_for_all():
    records = [*records_of(HF, (4.0, 2.0)), records_of(NONE, (3.0, 1.0))[0]]
    rows = result_rows(records, [HF, NONE], seed=0)
    assert [row.num_output_tokens for row in rows] == [4, 4]


def test_without_the_baseline_plain_decoding_is_the_reference():
    assert reference_arm(PHRASE, [NONE, PHRASE]) == NONE
    assert reference_arm(NONE, [NONE, PHRASE]) is None
    assert reference_arm(PHRASE, [PHRASE]) is None


def test_sampled_text_is_compared_with_plain_sampling_not_with_greedy_generate():
    plain, drafted = ArmName("none", "sampling"), ArmName("phrase", "sampling", 8)
    assert reference_arm(drafted, [HF, NONE, plain, drafted]) == plain


def test_intervals_become_objects_and_plain_figures_stay_numbers(rows):
    stored = rows["phrase"].as_dict()
    assert set(stored["tokens_per_second"]) == {"value", "low", "high"}
    assert stored["round_ms"] == pytest.approx(10.0)
    for name in [
        "suite",
        "drafter",
        "verifier",
        "batch_size",
        "tokens_per_second",
        "speedup_vs_hf_generate",
        "speedup_vs_none",
        "mean_acceptance_length",
        "accepted_per_round",
        "draft_ms_per_round",
        "round_ms",
        "mean_forward_width",
        "identical_fraction",
    ]:
        assert name in stored


def test_plain_decoding_for_a_speed_up_has_the_same_verifier():
    sampled, plain = ArmName("phrase", "sampling", 8), ArmName("none", "sampling")
    arms = [NONE, plain, sampled]
    records = [record(arm, 0, [7, 8], seconds) for arm, seconds in zip(arms, (8.0, 4.0, 2.0), strict=True)]
    rows = result_rows(records, arms, seed=0)
    assert [row.speedup_vs_none.value for row in rows] == [1.0, 1.0, 2.0]
