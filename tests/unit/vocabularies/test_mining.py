"""Candidates and their choice, against brute force on texts small enough to see through."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from paceline.errors import ConfigError
from paceline.vocabularies.candidates import Candidates
from paceline.vocabularies.mining import Criterion, MinedPhrase, choose_covering, mine_phrases
from paceline.vocabularies.token_text import TokenText, token_text

# Tokens of a made-up tokenizer: 0 ends a text, 1 is another control token, 2 and 3 spell one word together.
PIECES = (b"<end>", b"<turn>", b" Un", b"ited", b" we", b" go", b",", b"\n", b" ", b"7")
TEXT = TokenText(PIECES, frozenset({0, 1}))
END, TURN, UN, ITED, WE, GO, COMMA, NEWLINE, BLANK, SEVEN = range(len(PIECES))


def mined(
    *sequences: list[int], num_entries: int = 1000, max_words: int = 3, criterion: Criterion = "count"
) -> list[MinedPhrase]:
    return mine_phrases(
        sequences,
        TEXT,
        num_entries=num_entries,
        max_words=max_words,
        max_tokens=12,
        criterion=criterion,
        eos_token_ids=frozenset({END}),
    )


def found(*sequences: list[int], num_entries: int = 1000, max_words: int = 3) -> set[tuple[int, ...]]:
    return {p.token_ids for p in mined(*sequences, num_entries=num_entries, max_words=max_words)}


def test_phrases_end_with_a_word_and_hold_at_most_max_words() -> None:
    text = [UN, ITED, WE, GO] * 3
    phrases = found(text, max_words=2)
    assert (UN, ITED) in phrases
    assert (UN, ITED, WE) in phrases
    assert (WE, GO) in phrases
    assert (GO, UN) not in phrases, "ends inside a word"
    assert (UN, ITED, WE, GO) not in phrases, "three words"
    assert (UN, ITED, WE, GO) in found(text, max_words=3)


def test_phrases_may_begin_inside_a_word() -> None:
    assert (ITED, WE) in found([UN, ITED, WE] * 2)


def test_any_frequent_token_is_a_phrase() -> None:
    assert {(UN,), (ITED,), (WE,)} <= found([UN, ITED, WE] * 2)


def test_punctuation_and_blanks_cost_no_word() -> None:
    phrases = found([WE, COMMA, GO, BLANK, SEVEN, COMMA, NEWLINE] * 2, max_words=2)
    assert (WE, COMMA, GO, BLANK) in phrases
    assert (BLANK, SEVEN, COMMA, NEWLINE) in phrases
    assert (WE, COMMA, GO, BLANK, SEVEN) not in phrases


def test_no_phrase_runs_past_the_end_of_a_text() -> None:
    phrases = found([WE, GO, END], [WE, GO, END], [GO, END, WE, GO])
    assert (WE, GO, END) in phrases
    assert not any(END in phrase[:-1] for phrase in phrases)


def test_no_phrase_holds_another_control_token() -> None:
    phrases = found(*[[WE, TURN, GO]] * 3)
    assert phrases == {(WE,), (GO,), (END,)}


def test_phrases_do_not_cross_from_one_answer_to_the_next() -> None:
    assert (GO, WE) not in found([WE, GO], [WE, GO], [WE, GO])


def test_the_end_of_a_text_is_always_a_phrase() -> None:
    assert (END,) in found([WE, GO] * 3)
    assert (END,) in found([WE, GO] * 3, num_entries=1)


def test_rare_runs_are_no_phrases() -> None:
    assert found([WE, GO]) == {(END,)}


def test_counts_are_occurrences_in_the_text() -> None:
    counts = {phrase.token_ids: phrase.count for phrase in mined([WE, GO, WE, GO, WE], [GO, END])}
    assert counts[WE,] == 3
    assert counts[WE, GO] == 2
    assert counts[GO, WE] == 2
    assert counts[END,] == 1


def test_the_criterion_count_takes_the_most_frequent_runs() -> None:
    phrases = mined([WE] * 5 + [COMMA] + [GO] * 9, num_entries=3, max_words=1)
    assert [phrase.token_ids for phrase in phrases] == [(GO,), (WE,), (END,)]


def test_two_spellings_of_one_text_keep_the_frequent_one() -> None:
    pieces = TokenText((b" a", b" b", b" a b"), frozenset())
    phrases = mine_phrases(
        [[0, 1, 0, 1, 0, 1, 2, 2]],
        pieces,
        num_entries=9,
        max_words=2,
        max_tokens=8,
        criterion="accepted",
        eos_token_ids=frozenset(),
    )
    spelt = [pieces.join(phrase.token_ids) for phrase in phrases]
    assert len(set(spelt)) == len(spelt)
    assert (0, 1) in [phrase.token_ids for phrase in phrases]
    assert (2,) not in [phrase.token_ids for phrase in phrases]


def test_unknown_tokens_and_empty_texts_are_refused() -> None:
    with pytest.raises(ConfigError, match="token id 10 in the text: the tokenizer has ids 0 to 9"):
        mined([WE, 10])
    with pytest.raises(ConfigError, match="no text to mine"):
        mined([], [])


def test_toy_answers_give_phrases_of_every_kind(byte_level: Tokenizer, answers: tuple[str, ...]) -> None:
    text = token_text(byte_level)
    sequences = [byte_level.encode(answer).ids for answer in answers] * 2
    phrases = mine_phrases(
        sequences,
        text,
        num_entries=10_000,
        max_words=3,
        max_tokens=12,
        criterion="count",
        eos_token_ids=frozenset({byte_level.token_to_id("<|end|>")}),
    )
    spelt = {text.join(phrase.token_ids).decode("utf-8", "replace") for phrase in phrases}
    assert {" United States", "The United States", " is", " = ", ".\n\nSo"} <= spelt
    assert {"\n    return x", ", don't", "今天天气很好", "😀"} <= spelt
    assert "🤖" not in spelt
    assert "<|end|>" in spelt


def test_every_position_of_frequent_text_begins_a_phrase(
    byte_level: Tokenizer, answers: tuple[str, ...]
) -> None:
    sequences = [byte_level.encode(answer).ids for answer in answers] * 2
    phrases = mine_phrases(
        sequences,
        token_text(byte_level),
        num_entries=10_000,
        max_words=3,
        max_tokens=12,
        criterion="accepted",
        eos_token_ids=frozenset(),
    )
    first_tokens = {phrase.token_ids[0] for phrase in phrases}
    assert {token for sequence in sequences for token in sequence} <= first_tokens


def covered(candidates: Candidates, chosen: list[int], decay: float) -> float:
    """Worth of all tokens when every position is labelled with its longest chosen candidate."""
    lengths, parents = candidates.lengths.tolist(), candidates.parents.tolist()

    def worth(index: int) -> float:
        return sum(decay**place for place in range(lengths[index])) if index >= 0 else 0.0

    def above(index: int) -> int:
        index = parents[index]
        while index >= 0 and index not in chosen:
            index = parents[index]
        return index

    return sum(int(candidates.counts[i]) * (worth(i) - worth(above(i))) for i in chosen)


@st.composite
def candidate_tables(draw: st.DrawFn) -> Candidates:
    """Random prefix relations with counts that never grow from a candidate to a longer one."""
    size = draw(st.integers(1, 7))
    parents = [draw(st.integers(-1, i - 1)) for i in range(size)]
    lengths, counts = [], []
    for parent in parents:
        lengths.append((lengths[parent] if parent >= 0 else 0) + draw(st.integers(1, 3)))
        used = sum(counts[i] for i in range(len(counts)) if parents[i] == parent)
        free = counts[parent] - used if parent >= 0 else 20
        counts.append(draw(st.integers(0, max(free, 0))))
    columns = (list(range(size)), lengths, counts, parents)
    return Candidates(*(np.array(column, dtype=np.int64) for column in columns))


@settings(deadline=None, max_examples=60)
@given(candidate_tables(), st.integers(1, 7), st.sampled_from([1.0, 0.7, 0.25]))
def test_each_choice_adds_the_most_that_one_phrase_can_add(
    candidates: Candidates, num_entries: int, decay: float
) -> None:
    chosen = choose_covering(candidates, num_entries, decay)

    def gains(before: list[int]) -> dict[int, float]:
        base = covered(candidates, before, decay)
        others = [i for i in range(len(candidates.counts)) if i not in before]
        return {i: covered(candidates, [*before, i], decay) - base for i in others}

    for place, index in enumerate(chosen):
        added = gains(chosen[:place])
        assert added[index] == pytest.approx(max(added.values()))
        assert added[index] > 0
    if len(chosen) < num_entries:
        assert max(gains(chosen).values(), default=0) == pytest.approx(0, abs=1e-9)


def test_later_tokens_of_a_phrase_are_worth_less() -> None:
    # A long run that occurs twice against a single token that occurs nine times.
    text = [UN, ITED, WE, GO, WE, GO, TURN] * 2 + [SEVEN, TURN] * 9
    long_first = mined(text, num_entries=2, criterion="accepted", max_words=5)
    assert long_first[0].token_ids == (SEVEN,)
