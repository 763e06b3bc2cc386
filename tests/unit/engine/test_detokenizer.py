"""The streamed pieces join to the text: decoded ids, cut at the stop string, nothing shown and taken back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.detokenizer import IncrementalDetokenizer
from paceline.engine.stop_strings import StopChecker
from paceline.engine.text_decoder import TextDecoder

WORDS = ["The", " par", "is", " is", " Paris", ".", " the"]


def stream(tokenizer, ids, length, skip_special_tokens=True, **options) -> list[str]:
    """Pieces of a text whose ids arrive in blocks; the last one comes from `finish`."""
    detokenizer = IncrementalDetokenizer(TextDecoder(tokenizer, skip_special_tokens), **options)
    pieces = [detokenizer.push(ids[start : start + length]) for start in range(0, len(ids), length)]
    return [*pieces, detokenizer.finish()]


def test_special_tokens_are_left_out_unless_wanted(byte_level, speller):
    ids = [speller.word("The"), byte_level.eos_token_id]
    assert "".join(stream(byte_level, ids, 1)) == "The"
    assert "".join(stream(byte_level, ids, 1, skip_special_tokens=False)) == "The</s>"


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.sampled_from(WORDS), max_size=10),
    st.lists(st.sampled_from(["par", "is", "s P", "isis", ". The", "zz"]), max_size=3),
    st.integers(1, 6),
    st.booleans(),
)
def test_text_ends_at_the_first_stop_string(byte_level, speller, words, stop, length, include_stop_string):
    ids, text = [speller.word(word) for word in words], "".join(words)
    ends = {end: s for s in sorted(stop, key=len) for end in range(len(text) + 1) if text[:end].endswith(s)}
    if ends:
        end = min(ends)
        text = text[: end if include_stop_string else end - len(ends[end])]
    pieces = stream(byte_level, ids, length, stop=stop, include_stop_string=include_stop_string)
    assert "".join(pieces) == text


@pytest.mark.parametrize("length", range(1, 8))
def test_trimmed_ids_give_the_text_before_the_stop_string(byte_level, speller, length):
    ids = [speller.word(word) for word in ("The", " capital", " of", " France", " is", " Paris", ".")]
    num_kept = StopChecker(byte_level, [" is Par"]).find_stop(ids, 0)
    pieces = stream(byte_level, ids[:num_kept], length, stop=[" is Par"])
    assert "".join(pieces) == "The capital of France"
    included = stream(byte_level, ids[:num_kept], length, stop=[" is Par"], include_stop_string=True)
    assert "".join(included) == "The capital of France is Par"


def test_beginning_of_a_stop_string_waits_and_comes_back(byte_level, speller):
    detokenizer = IncrementalDetokenizer(TextDecoder(byte_level), stop=[" is Pal"])
    assert detokenizer.push([speller.word("The"), speller.word(" is")]) == "The"
    assert detokenizer.push([speller.word(" Paris")]) == " is Paris"


def test_held_beginning_is_released_at_the_end(byte_level, speller):
    detokenizer = IncrementalDetokenizer(TextDecoder(byte_level), stop=[" is Par"])
    assert detokenizer.push([speller.word("The"), speller.word(" is")]) == "The"
    assert detokenizer.finish() == " is"
    assert detokenizer.finish() == ""


def test_nothing_follows_the_stop_string(byte_level, speller):
    detokenizer = IncrementalDetokenizer(TextDecoder(byte_level), stop=["is"])
    assert detokenizer.push([speller.word("The"), speller.word(" is")]) == "The "
    assert detokenizer.push([speller.word(" the")]) == ""
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("length", [1, 2, 4, 5])
def test_only_the_last_piece_may_hold_a_broken_character(byte_level, speller, length):
    ids = (speller.emoji() * 16)[:47]
    pieces = stream(byte_level, ids, length)
    assert not any("\ufffd" in piece for piece in pieces[:-1])
    assert "".join(pieces) == byte_level.decode(ids, clean_up_tokenization_spaces=False)
