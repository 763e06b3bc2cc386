"""Stop strings end a text at the same token whatever the size of the accepted blocks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.stop_strings import StopChecker, StopMatch, StopMatcher

letters = st.text("abc", max_size=12)
stops = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)


def naive_match(text: str, stop) -> StopMatch | None:
    """The first stop string to be completed, the longest of those that end together."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stop if text[:end].endswith(s)]
        if starts:
            return StopMatch(min(starts), end)
    return None


def kept(tokenizer, stop, ids, length) -> int | None:
    """Ids kept when they arrive in blocks of `length`."""
    checker = StopChecker(tokenizer, stop)
    for start in range(0, len(ids), length):
        found = checker.find_stop(ids[: start + length], start)
        if found is not None:
            return found
    return None


@settings(deadline=None, max_examples=100)
@given(letters, stops, st.lists(st.integers(0, 4), min_size=12, max_size=12))
def test_matcher_finds_the_first_string_to_be_completed(text, stop, cuts):
    matcher = StopMatcher(stop)
    start, found = 0, None
    for cut in [*cuts, len(text)]:
        found = matcher.feed(text[start : start + cut])
        start += cut
        if found is not None or start >= len(text):
            break
    assert found == naive_match(text, stop)


@settings(deadline=None, max_examples=100)
@given(letters, stops)
def test_held_characters_are_the_longest_possible_beginning(text, stop):
    matcher = StopMatcher(stop)
    if matcher.feed(text) is None:
        beginnings = [n for n in range(1, len(text) + 1) if any(s.startswith(text[-n:]) for s in stop)]
        assert matcher.num_held == max(beginnings, default=0)


@pytest.mark.parametrize("length", range(1, 9))
def test_token_that_completes_the_stop_string_is_the_last_one_kept(byte_level, speller, length):
    words = ["The", " capital", " of", " France", " is", " Paris", "."]
    ids = [speller.word(word) for word in words]
    # The stop string ends inside the token " Paris".
    assert kept(byte_level, [" is Par"], ids, length) == 6
    assert kept(byte_level, [" is Pal"], ids, length) is None


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.sampled_from(["The", " par", "is", " is", " Paris", ".", "é"]), max_size=10),
    st.lists(st.sampled_from(["par", "is", "s P", "isis", "é", "é.", ". The"]), min_size=1, max_size=3),
    st.integers(1, 10),
)
def test_block_size_does_not_matter(byte_level, speller, words, stop, length):
    # "é" is two tokens, so a block may end inside a character.
    ids = [i for word in words for i in (speller.bytes_of(word) if word == "é" else [speller.word(word)])]
    naive = next(
        (n for n in range(1, len(ids) + 1) if any(s in byte_level.decode(ids[:n]) for s in stop)), None
    )
    assert kept(byte_level, stop, ids, length) == naive


def test_stop_string_may_span_blocks(byte_level, speller):
    checker = StopChecker(byte_level, ["capital of"])
    ids = [speller.word(word) for word in ("The", " capital", " of", " France")]
    assert checker.find_stop(ids[:2], 0) is None
    assert checker.find_stop(ids, 2) == 3


def test_earliest_of_several_stop_strings_counts(byte_level, speller):
    ids = [speller.word(word) for word in ("The", " capital", " of", " France", ".")]
    assert StopChecker(byte_level, [".", "France", "tal o"]).find_stop(ids, 0) == 3


def test_a_special_token_stops_by_its_id(tokenizer):
    """It is no part of the text, so it cannot be found there."""
    end = tokenizer.convert_tokens_to_ids("<pad>")
    ids = tokenizer("ab cd", add_special_tokens=False)["input_ids"]
    assert StopChecker(tokenizer, ["<pad>", "zz"]).find_stop([*ids, end, *ids], 0) == len(ids) + 1
    assert StopChecker(tokenizer, ["<pad>", "cd"]).find_stop([*ids, end, *ids], 0) == len(ids)
    assert StopChecker(tokenizer, ["zz"]).find_stop([*ids, end, *ids], 0) is None
