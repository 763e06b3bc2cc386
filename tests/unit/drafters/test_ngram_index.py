"""The n-gram index finds what a search through the whole text would find."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafters.ngram_index import NgramIndex, NgramMatch


def search(text, min_size, max_size, num_kept) -> list[NgramMatch]:
    """All earlier occurrences of the end of the text, by comparing at every position."""
    found: dict[int, NgramMatch] = {}
    for size in range(max_size, min_size - 1, -1):
        if size <= len(text):
            ends = [end for end in range(size, len(text)) if text[end - size : end] == text[-size:]]
            for end in ends[::-1][:num_kept]:
                found.setdefault(end, NgramMatch(size, end))
    return list(found.values())


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=8), max_size=5),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(1, 4),
)
def test_matches_equal_a_search_of_the_whole_text(parts, min_size, more, num_kept):
    index = NgramIndex(min_size, min_size + more, num_kept)
    text: list[int] = []
    for part in parts:
        index.extend(part)
        text += part
        assert len(index) == len(text)
        assert index.matches() == search(text, min_size, min_size + more, num_kept)


@pytest.mark.parametrize("text", [[], [5], [5, 6], [5, 6, 7]], ids=str)
def test_short_text_without_repetition_has_no_match(text):
    index = NgramIndex()
    index.extend(text)
    assert index.matches() == []


def test_longest_match_comes_first_then_the_newest():
    index = NgramIndex(num_kept=4)
    index.extend([1, 2, 3, 9, 2, 3, 8, 3, 7, 1, 2, 3])
    assert index.matches() == [NgramMatch(3, 3), NgramMatch(2, 6), NgramMatch(1, 8)]


def test_continuation_is_what_followed():
    index = NgramIndex()
    index.extend([1, 2, 3, 4, 5])
    assert index.continuation(1, 3) == [2, 3, 4]


def test_continuation_past_the_end_repeats_the_loop():
    index = NgramIndex()
    index.extend([7, 1, 2, 3, 1, 2, 3])
    newest = index.matches()[0]
    assert newest == NgramMatch(3, 4)
    assert index.continuation(newest.end, 8) == [1, 2, 3, 1, 2, 3, 1, 2]
