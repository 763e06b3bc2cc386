"""Repetition of an answer by its tokens."""

from __future__ import annotations

import pytest

from paceline.bench.quality import Repetition, repeated_ngrams


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        ([], (0, 0)),
        ([1, 2, 3], (0, 0)),
        ([1, 2, 3, 4], (1, 0)),
        ([1, 2, 3, 4, 5], (2, 0)),
        ([1, 2, 3, 4, 1, 2, 3, 4], (5, 1)),
        ([7] * 10, (7, 6)),
    ],
)
def test_counts_ngrams_that_stand_further_up(token_ids, expected):
    assert repeated_ngrams(token_ids) == Repetition(*expected)


def test_size_of_the_groups_can_be_chosen():
    assert repeated_ngrams([1, 2, 1, 2], size=2) == Repetition(3, 1)
