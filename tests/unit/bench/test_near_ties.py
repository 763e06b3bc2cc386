"""Where answers part, and whether rounding explains it."""

from __future__ import annotations

import pytest
import torch

from bench_fakes import record
from paceline.bench.arms import ArmName
from paceline.bench.check import CheckOutcome
from paceline.bench.near_ties import (
    Difference,
    answered_sequences,
    find_differences,
    first_difference,
    logit_gaps,
    width_noise,
)
from paceline.testing import tiny_model

HF, NONE = ArmName("hf_generate"), ArmName("none")
PROMPT = (5, 6, 7)


@pytest.mark.parametrize(
    ("own", "other", "position"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([1, 2, 3], [1], 1), ([], [], None)],
)
def test_first_difference(own, other, position):
    assert first_difference(own, other) == position


@pytest.fixture
def ranked(target_of):
    """The tiny model, its logits after PROMPT, and tokens from likeliest to least likely."""
    model = target_of().model
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0, -1]
    return model, logits, logits.argsort(descending=True).tolist()


def test_gap_of_the_two_likeliest_tokens_is_the_top_2_gap(ranked):
    model, logits, order = ranked
    expected = float(logits[order[0]] - logits[order[1]])
    for pair in ((order[0], order[1]), (order[1], order[0])):
        assert logit_gaps(model, PROMPT, *pair) == pytest.approx((expected, expected), abs=1e-4)


def test_gap_is_that_of_the_less_likely_of_the_two(ranked):
    model, logits, order = ranked
    _, gap = logit_gaps(model, PROMPT, order[1], order[5])
    assert gap == pytest.approx(float(logits[order[0]] - logits[order[5]]), abs=1e-4)


def test_an_answer_that_ends_early_has_no_finite_gap(ranked):
    assert logit_gaps(ranked[0], PROMPT, 5, None)[1] == float("inf")


def test_differences_are_judged_after_the_common_prefix(ranked):
    model, _, order = ranked
    records = [
        record(HF, 0, [order[0], 8], 1.0, prompt_ids=PROMPT),
        record(NONE, 0, [order[1], 9], 1.0, prompt_ids=PROMPT),
        record(HF, 1, [7, 7], 1.0, prompt_ids=PROMPT),
        record(NONE, 1, [7, 7], 1.0, prompt_ids=PROMPT),
    ]
    [found] = find_differences(records, [HF, NONE], model)
    assert (found.prompt_id, found.position, found.arm, found.reference) == ("p0", 0, str(NONE), str(HF))
    assert (found.reference_token_id, found.token_id) == (order[0], order[1])
    assert found.gap == pytest.approx(logit_gaps(model, PROMPT, order[0], order[1])[1])


def sequences(count, length):
    source = torch.Generator().manual_seed(1)
    return [torch.randint(3, 96, (length,), generator=source).tolist() for _ in range(count)]


def test_rounding_noise_is_tiny_in_fp32_and_not_in_bf16():
    assert width_noise(tiny_model(), sequences(2, 80)) < 1e-4
    assert width_noise(tiny_model(dtype=torch.bfloat16), sequences(2, 80)) > 1e-3


def test_noise_grows_with_the_percentile():
    model = tiny_model(dtype=torch.bfloat16)
    assert width_noise(model, sequences(2, 80), 50.0) < width_noise(model, sequences(2, 80), 99.9)


def test_noise_needs_texts_longer_than_the_width():
    assert width_noise(tiny_model(), sequences(2, 64)) is None


def difference(gap):
    return Difference("check", 1, "none/greedy", "hf_generate/greedy", "p", 0, 3, 1, 2, gap, gap)


def test_a_gap_above_the_noise_is_a_violation():
    outcome = CheckOutcome(
        0.25, 3, tuple(difference(gap) for gap in (0.0, 0.25, 0.26, float("inf"), float("nan")))
    )
    assert len(outcome.violations) == 3


def test_later_turns_are_not_compared_after_a_difference(ranked):
    from dataclasses import replace

    def two_turns(arm, first, second):
        one, other = record(arm, 0, first, 1.0), record(arm, 0, second, 1.0, turn=1)
        return replace(one, turns=(*one.turns, *other.turns))

    records = [two_turns(HF, [7, 7], [8, 8]), two_turns(NONE, [7, 9], [9, 9])]
    [found] = find_differences(records, [HF, NONE], ranked[0])
    assert (found.turn, found.position) == (0, 1)


def test_equal_partings_are_judged_once(ranked, monkeypatch):
    from paceline.bench import near_ties

    judged = []
    monkeypatch.setattr(near_ties, "logit_gaps", lambda *place: judged.append(place) or (0.0, 0.0))
    lookup = ArmName("prompt_lookup", "greedy", 4)
    records = [record(HF, 0, [7, 7], 1.0), record(NONE, 0, [7, 9], 1.0), record(lookup, 0, [7, 9], 1.0)]
    assert len(find_differences(records, [HF, NONE, lookup], ranked[0])) == 2
    assert len(judged) == 1


def test_sequences_for_the_noise_are_spread_over_the_run():
    records = [record(HF, group, [group], 1.0, prompt_ids=(5,)) for group in range(12)]
    assert [ids[-1] for ids in answered_sequences(records)[:4]] == [0, 3, 6, 9]
