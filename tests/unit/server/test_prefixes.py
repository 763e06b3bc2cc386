"""Caches of finished answers: who takes which over, and which are dropped."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paceline.server.prefixes import LEAST_SHARED, PrefixCache


class Answer:
    def __init__(self, *token_ids):
        self.sequence = SimpleNamespace(token_ids=list(token_ids))


@pytest.fixture
def dropped():
    return []


def of(length, last=0):
    """An answer that begins as all others here do, for all but its last token."""
    return Answer(*range(length - 1), 1000 + last)


def test_a_prompt_takes_the_answer_that_it_agrees_with_longest(dropped):
    cache = PrefixCache(1000, 8, dropped.append)
    short, long, other = of(30), of(50), Answer(*range(500, 540))
    for answer in (short, long, other):
        cache.keep(answer)
    assert cache.take(list(range(60))) is long
    assert cache.take(list(range(60))) is short, "the first is no longer kept"
    assert cache.take(list(range(60))) is None
    assert cache.num_tokens == 40
    assert dropped == []


def test_a_cache_is_not_taken_apart_for_a_short_beginning(dropped):
    cache = PrefixCache(1000, 8, dropped.append)
    cache.keep(of(200))
    assert cache.take(list(range(99))) is None, "less than half of it would be used"
    assert cache.take(list(range(100))) is not None
    cache.keep(of(LEAST_SHARED))
    assert cache.take(list(range(LEAST_SHARED - 1))) is None, "reading so few again costs less"


def test_the_least_recently_finished_are_dropped(dropped):
    cache = PrefixCache(100, 3, dropped.append)
    answers = [of(20, i) for i in range(4)]
    for answer in answers:
        cache.keep(answer)
    assert dropped == answers[:1], "three slots"
    large = of(70)
    cache.keep(large)
    assert dropped == answers[:3], "a hundred tokens"
    cache.clear()
    assert dropped[3:] == [large, answers[3]]
    assert cache.num_tokens == 0


def test_without_room_nothing_is_kept(dropped):
    cache = PrefixCache(0, 8, dropped.append)
    answer = of(20)
    cache.keep(answer)
    assert dropped == [answer]
