"""How much of a prompt is read at once."""

from __future__ import annotations

import pytest

from paceline.engine.prefill import LEAST_CHUNK, MAX_PASSED_OVER, FixedPace, ReadingOrder, TimedPace
from paceline.errors import ConfigError


def test_a_fixed_pace_never_changes():
    pace = FixedPace(7)
    pace.observe(7, 100.0)
    assert pace.chunk_len == 7
    with pytest.raises(ConfigError, match="prefill_chunk is 0"):
        FixedPace(0)


@pytest.mark.parametrize(
    ("seconds_per_token", "expected"), [(0.0005, 40), (0.0001, 200), (0.00001, 512), (0.1, LEAST_CHUNK)]
)
def test_pieces_come_to_take_as_long_as_asked_for(seconds_per_token, expected):
    pace = TimedPace(0.02)
    for _ in range(60):
        pace.observe(pace.chunk_len, pace.chunk_len * seconds_per_token)
    assert pace.chunk_len == pytest.approx(expected, rel=0.1)


def test_one_slow_piece_does_not_undo_what_was_learned_and_short_ones_say_nothing():
    pace = TimedPace(0.02)
    for _ in range(60):
        pace.observe(pace.chunk_len, pace.chunk_len * 0.0001)
    before = pace.chunk_len
    pace.observe(before - 1, 5.0)
    assert pace.chunk_len == before
    pace.observe(before, 5.0)
    assert pace.chunk_len > before / 2


def test_no_time_at_all_is_refused():
    with pytest.raises(ConfigError, match="prefill_seconds is 0"):
        TimedPace(0)


def test_short_prompts_and_the_ends_of_long_ones_are_read_at_once():
    assert [FixedPace(10).take(pending) for pending in (1, 10, 11, 25)] == [1, 10, 10, 10]
    pace = TimedPace(0.02)
    assert [pace.take(pending) for pending in (1, 64, 96, 97, 500)] == [1, 64, 96, 16, 16]
    for _ in range(60):
        pace.observe(pace.chunk_len, pace.chunk_len * 0.0001)
    assert [pace.take(pending) for pending in (96, 150, 500)] == [96, 150, pace.chunk_len]
    assert TimedPace(0.02, most=20).take(30) == 16


@pytest.mark.parametrize(
    ("pending", "pads_rows", "groups"),
    [
        ([30, 20, 14], False, [[30, 20, 14]]),
        ([30, 20, 14], True, [[30, 20], [14]]),
        ([30, 40], False, [[30], [40]]),
        ([500, 64], False, [[64], [500]]),
        ([500, 400, 300], False, [[300]]),
        ([], False, []),
    ],
    ids=["one forward", "padded", "too much for one", "short ones first", "one of the long ones", "nobody"],
)
def test_prompts_share_forwards_up_to_a_piece(pending, pads_rows, groups):
    sequences = {object(): num_tokens for num_tokens in pending}
    found = ReadingOrder().groups(sequences, FixedPace(64), pads_rows=pads_rows)
    assert [[sequences[s] for s in group] for group in found] == groups


def test_one_prompt_a_round_is_read_whole_beyond_a_piece():
    """Many that arrive together must not hold up everybody for all of them."""
    pace, order = TimedPace(0.02), ReadingOrder()
    sequences = dict.fromkeys(range(7), 90)
    assert order.groups(sequences, pace, pads_rows=False) == [[0]]
    assert pace.take(90) == 90


def test_a_long_prompt_is_not_passed_over_for_ever():
    order = ReadingOrder()
    read = [order.groups({"long": 900, "newer": 100}, FixedPace(10), pads_rows=True)[0][0] for _ in range(8)]
    assert read == [*["newer"] * MAX_PASSED_OVER, "long"] * 2
