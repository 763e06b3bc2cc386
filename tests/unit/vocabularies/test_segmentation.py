"""Word boundaries at token edges."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.vocabularies.segmentation import WORD_WEIGHT, word_edges


def boundaries(*pieces: str) -> list[bool]:
    return word_edges([piece.encode() for piece in pieces]).is_boundary.tolist()


def words(*pieces: str) -> float:
    weight = word_edges([piece.encode() for piece in pieces]).weight
    return (weight[-1] - weight[0]) / WORD_WEIGHT


def test_a_word_of_several_tokens_has_no_inner_boundary() -> None:
    assert boundaries(" Un", "ited", " States") == [True, False, True, True]


@pytest.mark.parametrize("pieces", [("don", "'t"), ("3", ".", "14"), ("foo", "_", "bar"), ("1", ",", "000")])
def test_apostrophes_decimals_and_underscores_stay_inside_a_word(pieces: tuple[str, ...]) -> None:
    assert boundaries(*pieces) == [True, *[False] * (len(pieces) - 1), True]
    assert words(*pieces) == 1


def test_punctuation_newlines_and_operators_are_units_that_cost_no_word() -> None:
    assert boundaries("42", ".", "\n\n", "So", " =", " ") == [True] * 7
    assert words(".", "\n\n") == 0
    assert words(" =", " ") == 0


def test_indentation_is_one_unit_before_its_word() -> None:
    assert boundaries("\n", "   ", " return") == [True, True, False, True]
    assert words("\n", "   ", " return") == 1


def test_an_edge_inside_a_character_is_no_boundary() -> None:
    emoji = "😀".encode()
    edges = word_edges([b"a ", emoji[:1], emoji[1:3], emoji[3:], b"!"])
    assert edges.is_boundary.tolist() == [True, True, False, False, True, True]


def test_bytes_that_are_no_text_do_not_shift_later_boundaries() -> None:
    edges = word_edges([b"ab", b"\xff", b" c", "é".encode(), b"d"])
    assert edges.is_boundary.tolist() == [True, True, True, False, False, True]


def test_two_ideographs_or_kana_make_a_word() -> None:
    assert boundaries("今", "天天", "气") == [True] * 4
    assert words("今", "天天", "气") == 2
    assert words("です") == 1


def test_four_thai_clusters_make_a_word() -> None:
    assert words("ภาษา") == 1
    assert boundaries("ภา", "ษา") == [True] * 3


def test_korean_words_are_counted_by_their_spaces() -> None:
    assert words("한국어", " 문장") == 2


def test_a_word_begun_before_the_edge_counts_for_what_follows() -> None:
    weight = word_edges([b" Un", b"ited", b" States"]).weight
    assert (weight[3] - weight[1]) / WORD_WEIGHT == 2


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text(max_size=4), max_size=8))
def test_edges_fit_the_tokens_and_weights_never_fall(pieces: list[str]) -> None:
    edges = word_edges([piece.encode("utf-8", "surrogatepass") for piece in pieces])
    assert len(edges.is_boundary) == len(edges.weight) == len(pieces) + 1
    assert edges.is_boundary[0]
    assert edges.is_boundary[-1]
    assert edges.weight[0] == 0
    assert (edges.weight[1:] >= edges.weight[:-1]).all()
