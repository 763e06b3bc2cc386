"""How much of a prompt is read at once."""

from __future__ import annotations

import pytest

from paceline.engine.prefill import LEAST_CHUNK, FixedPace, TimedPace
from paceline.errors import ConfigError


def test_a_fixed_pace_never_changes():
    pace = FixedPace(7)
    pace.observe(7, 100.0)
    assert pace.chunk_len == 7
    with pytest.raises(ConfigError, match="prefill_chunk is 0"):
        FixedPace(0)


@pytest.mark.parametrize(
    ("seconds_per_token", "expected"), [(0.0002, 100), (0.0001, 200), (0.00001, 512), (0.1, LEAST_CHUNK)]
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


def test_the_end_of_a_prompt_may_be_longer_than_a_piece():
    assert [FixedPace(10).take(pending) for pending in (1, 10, 11, 25)] == [1, 10, 10, 10]
    assert [TimedPace(0.02).take(pending) for pending in (1, 64, 96, 97, 500)] == [1, 64, 96, 64, 64]
