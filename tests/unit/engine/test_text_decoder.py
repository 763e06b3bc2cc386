"""Pieces of text, however the ids are cut, join to what the tokenizer makes of all ids."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.text_decoder import TextDecoder

cuts = st.lists(st.integers(1, 5), min_size=16, max_size=16)


def blocks(ids, lengths):
    """Cut ids into consecutive blocks."""
    start = 0
    for length in lengths:
        if start < len(ids):
            yield ids[start : start + length]
        start += length


def full_text(tokenizer, ids, skip_special_tokens=True) -> str:
    return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


@settings(deadline=None, max_examples=80)
@given(st.data(), cuts, st.booleans(), st.booleans())
def test_pieces_join_to_the_decoded_text(any_tokenizer, data, lengths, skip_special_tokens, is_wordy):
    last = len(any_tokenizer) - 1
    # All ids alike are mostly broken bytes; the last ones are words and pieces.
    token = st.integers(0, last) | st.integers(last - 12, last) if is_wordy else st.integers(0, last)
    ids = data.draw(st.lists(token, max_size=16))
    decoder = TextDecoder(any_tokenizer, skip_special_tokens)
    pieces = [decoder.push(block) for block in blocks(ids, lengths)]
    assert "".join(pieces) + decoder.finish() == full_text(any_tokenizer, ids, skip_special_tokens)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 60), max_size=16), cuts)
def test_blocks_release_as_much_as_single_tokens(any_tokenizer, choice, lengths):
    ids = [len(any_tokenizer) - 1 - i for i in choice]
    single, blockwise = TextDecoder(any_tokenizer), TextDecoder(any_tokenizer)
    for block in blocks(ids, lengths):
        assert blockwise.push(block) == "".join(single.push([i]) for i in block)


@pytest.mark.parametrize("length", [1, 2, 4, 5])
@pytest.mark.parametrize("cap", [46, 47, 48])
def test_character_in_three_tokens_is_never_shown_in_part(byte_level, speller, length, cap):
    ids = (speller.emoji() * 16)[:cap]
    decoder = TextDecoder(byte_level)
    pieces = [decoder.push(block) for block in blocks(ids, [length] * cap)]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == "😀" * (cap // 3)
    assert "".join(pieces) + decoder.finish() == full_text(byte_level, ids)


def test_complete_text_before_a_partial_character_is_released(byte_level, speller):
    decoder = TextDecoder(byte_level)
    assert (
        decoder.push([speller.word("The"), speller.word(" capital"), *speller.emoji()[:2]]) == "The capital"
    )
    assert decoder.push(speller.emoji()[2:]) == "😀"
    assert decoder.finish() == ""


def test_byte_run_waits_because_a_bad_byte_would_spoil_all_of_it(byte_fallback):
    convert = byte_fallback.convert_tokens_to_ids
    run = [convert(f"<0x{byte:02X}>") for byte in "é".encode()]
    decoder = TextDecoder(byte_fallback)
    assert decoder.push([convert("▁the"), *run]) == "the"
    assert decoder.push([convert("s")]) == "és"
    spoilt = TextDecoder(byte_fallback)
    assert spoilt.push(run) == ""
    assert spoilt.push([convert("<0xFF>"), convert("s")]) == "\ufffd\ufffd\ufffds"


def test_skipped_special_token_does_not_end_a_byte_run(byte_fallback):
    convert = byte_fallback.convert_tokens_to_ids
    ids = [*(convert(f"<0x{byte:02X}>") for byte in "é".encode()), byte_fallback.eos_token_id]
    decoder = TextDecoder(byte_fallback)
    assert decoder.push(ids) == ""
    assert decoder.push([convert("<0xFF>"), convert("s")]) == "\ufffd\ufffd\ufffds"


def test_window_stays_short_however_long_the_text(byte_level, speller):
    class Counting:
        longest = 0

        def decode(self, ids, **options):
            Counting.longest = max(Counting.longest, len(ids))
            return byte_level.decode(ids, **options)

    decoder = TextDecoder(Counting())
    for _ in range(300):
        decoder.push([speller.word(" the"), speller.word(" par")])
    assert Counting.longest <= 6


def test_copy_goes_its_own_way(byte_level, speller):
    decoder = TextDecoder(byte_level)
    decoder.push([speller.word("The"), *speller.emoji()[:2]])
    twin = decoder.copy()
    assert twin.push(speller.emoji()[2:]) == "😀"
    assert decoder.push([speller.word(" par")]) == "\ufffd par"
    assert twin.push([speller.word(" is")]) == " is"
