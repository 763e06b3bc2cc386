"""Sequence.accept trims every block at the first stop condition, as decoding one token at a time would."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import RequestError
from paceline.sampling import SamplingParameters
from paceline.sequence import Segment, Sequence, VerifyResult
from paceline.tree import DraftTree

EOS = 2
STOP_ID = 5


def make_sequence(
    prompt=(7,), max_new_tokens=100, context_len=100, eos=(EOS,), ignore_eos=False, find_stop=None
) -> Sequence:
    parameters = SamplingParameters(max_new_tokens=max_new_tokens, ignore_eos=ignore_eos)
    return Sequence(list(prompt), parameters, frozenset(eos), context_len, 0, find_stop)


def block(ids) -> VerifyResult:
    """A fully accepted block: all tokens but the last were drafted."""
    return VerifyResult(tuple(range(1, len(ids))), tuple(ids[:-1]), ids[-1])


def stop_at_token(output_ids, num_before):
    """A stop string that token STOP_ID completes."""
    new = output_ids[num_before:]
    return num_before + new.index(STOP_ID) + 1 if STOP_ID in new else None


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=20),
    st.lists(st.integers(1, 6), min_size=20, max_size=20),
    st.integers(1, 15),
    st.integers(1, 15),
    st.booleans(),
    st.booleans(),
)
def test_blocks_stop_where_single_tokens_would(ids, cuts, max_new, room, ignore_eos, has_stop):
    settings_ = {
        "prompt": (7, 8),
        "max_new_tokens": max_new,
        "context_len": 2 + room,
        "eos": (EOS, 6),
        "ignore_eos": ignore_eos,
        "find_stop": stop_at_token if has_stop else None,
    }
    single, blocks = make_sequence(**settings_), make_sequence(**settings_)
    for token_id in ids:
        if not single.is_finished:
            single.accept(block([token_id]))
    start, emitted = 0, []
    for cut in cuts:
        if start >= len(ids) or blocks.is_finished:
            break
        result = blocks.accept(block(ids[start : start + cut]))
        emitted += result.emitted_ids
        assert len(result.path) == len(result.accepted_ids)
        start += cut
    assert blocks.output_ids == single.output_ids == emitted
    assert blocks.finish_reason == single.finish_reason
    assert len(blocks.output_ids) <= min(max_new, room)


def test_trims_after_eos():
    sequence = make_sequence()
    result = sequence.accept(block([3, EOS, 4, 4]))
    assert sequence.output_ids == [3, EOS]
    assert sequence.finish_reason == "stop"
    assert result == VerifyResult((1, 2), (3, EOS), None)


def test_any_of_several_eos_ids_ends_the_text():
    sequence = make_sequence(eos=(4, 6))
    sequence.accept(block([1, 6, 4]))
    assert sequence.output_ids == [1, 6]


def test_eos_as_the_very_first_token_gives_one_token():
    sequence = make_sequence()
    sequence.accept(block([EOS]))
    assert sequence.output_ids == [EOS]
    assert sequence.finish_reason == "stop"


@pytest.mark.parametrize("max_new_tokens", range(1, 9))
def test_budget_is_met_exactly_whatever_the_block(max_new_tokens):
    sequence = make_sequence(max_new_tokens=max_new_tokens)
    while not sequence.is_finished:
        sequence.accept(block([3, 3, 3]))
    assert sequence.output_ids == [3] * max_new_tokens
    assert sequence.finish_reason == "length"


def test_eos_in_the_last_free_place_counts_as_stop():
    sequence = make_sequence(max_new_tokens=2)
    sequence.accept(block([3, EOS, 4]))
    assert (sequence.output_ids, sequence.finish_reason) == ([3, EOS], "stop")


def test_context_limit_ends_the_text_without_a_budget():
    sequence = make_sequence(prompt=(1, 2, 3), max_new_tokens=None, context_len=5)
    assert sequence.room == 2
    sequence.accept(block([3, 3, 3, 3]))
    assert (sequence.output_ids, sequence.finish_reason, sequence.room) == ([3, 3], "length", 0)


def test_no_eos_ids_run_to_the_cap():
    sequence = make_sequence(eos=(), max_new_tokens=3)
    sequence.accept(block([EOS, EOS, EOS, EOS]))
    assert (sequence.output_ids, sequence.finish_reason) == ([EOS] * 3, "length")


def test_ignored_eos_does_not_end_the_text():
    sequence = make_sequence(ignore_eos=True)
    sequence.accept(block([EOS, 3]))
    assert sequence.output_ids == [EOS, 3]
    assert not sequence.is_finished


def test_stop_string_trims_the_block_and_its_path():
    sequence = make_sequence(find_stop=stop_at_token)
    sequence.accept(block([1]))
    result = sequence.accept(block([3, STOP_ID, 4]))
    assert sequence.output_ids == [1, 3, STOP_ID]
    assert (result.path, result.emitted_ids, result.rows) == ((1, 2), (3, STOP_ID), (0, 1))
    assert sequence.finish_reason == "stop"


def test_rows_name_the_node_that_predicted_each_emitted_token():
    full = VerifyResult((2, 5), (10, 11), 12)
    assert full.rows == (0, 2, 5)
    assert full.trimmed(2).rows == (0, 2)
    assert full.trimmed(1).rows == (0,)
    assert full.trimmed(3) is full


def test_empty_prompt_is_refused_with_a_reason():
    with pytest.raises(RequestError, match="the prompt has 0 tokens"):
        make_sequence(prompt=())


@pytest.mark.parametrize("length", [5, 6])
def test_prompt_without_room_for_an_answer_is_refused(length):
    with pytest.raises(RequestError, match="at most 4 leave room"):
        make_sequence(prompt=[1] * length, context_len=5)


def test_newest_token_is_the_root_of_the_next_tree():
    sequence = make_sequence(prompt=(7, 8))
    assert (sequence.last_token_id, len(sequence), sequence.token_ids) == (8, 2, [7, 8])
    sequence.accept(block([3, 4]))
    assert (sequence.last_token_id, len(sequence), sequence.token_ids) == (4, 4, [7, 8, 3, 4])


def test_equal_requests_are_different_sequences():
    assert len({make_sequence(), make_sequence()}) == 2


def test_segment_counts_its_rows():
    sequence = make_sequence()
    assert len(Segment(sequence, (1, 2), None)) == 2
    assert len(Segment(sequence, (1,), DraftTree(*(torch.zeros(3),) * 3))) == 4
