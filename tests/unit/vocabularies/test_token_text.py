"""The bytes behind tokens: exact for both tokenizer families."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from paceline.vocabularies.token_text import bytes_of, text_of, token_text


def test_byte_level_pieces_join_to_the_text(byte_level: Tokenizer, answers: tuple[str, ...]) -> None:
    text = token_text(byte_level)
    assert [text.join(byte_level.encode(a).ids) for a in answers] == [a.encode() for a in answers]


def test_sentencepiece_pieces_join_to_the_text_behind_a_space(
    sentencepiece: Tokenizer, answers: tuple[str, ...]
) -> None:
    text = token_text(sentencepiece)
    assert [text.join(sentencepiece.encode(a).ids) for a in answers] == [b" " + a.encode() for a in answers]


def test_byte_fallback_tokens_are_single_bytes(sentencepiece: Tokenizer) -> None:
    assert token_text(sentencepiece).pieces[sentencepiece.token_to_id("<0xE2>")] == b"\xe2"


def test_only_control_tokens_are_special(byte_level: Tokenizer, end: str) -> None:
    text = token_text(byte_level)
    assert text.special_ids == {byte_level.token_to_id(end), byte_level.token_to_id("<|turn|>")}
    assert text.pieces[byte_level.token_to_id(end)] == end.encode()


def test_an_added_word_is_plain_text(byte_level: Tokenizer) -> None:
    copy = Tokenizer.from_str(byte_level.to_str())
    copy.add_tokens(["caf\u00e9 au lait"])
    text = token_text(copy)
    assert text.pieces[copy.token_to_id("caf\u00e9 au lait")] == "caf\u00e9 au lait".encode()
    assert copy.token_to_id("caf\u00e9 au lait") not in text.special_ids


def test_a_transformers_tokenizer_gives_the_same_bytes(byte_level: Tokenizer, end: str) -> None:
    wrapped = PreTrainedTokenizerFast(tokenizer_object=byte_level, eos_token=end)
    assert token_text(wrapped) == token_text(byte_level)


def test_the_fingerprint_tells_tokenizers_apart(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    same = Tokenizer.from_str(byte_level.to_str())
    assert token_text(same).fingerprint == token_text(byte_level).fingerprint
    same.add_tokens(["more"])
    assert token_text(same).fingerprint != token_text(byte_level).fingerprint
    assert token_text(sentencepiece).fingerprint != token_text(byte_level).fingerprint


@pytest.mark.parametrize("piece", [b" word", "日".encode()[:2], b"\xff\x80 ok", "😀".encode()])
def test_text_of_loses_no_byte(piece: bytes) -> None:
    assert bytes_of(text_of(piece)) == piece
