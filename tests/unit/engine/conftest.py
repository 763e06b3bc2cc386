"""Tokenizers of every decoding style, built in memory."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ["The", " capital", " of", " France", " is", " Paris", ".", " the", " par", "is", "\n", "é", "你好"]
PIECES = ["▁", "▁▁", "▁the", "▁cat", "s", "at", "é", "你", "▁你", "\ufffd", ".", "\n"]
STYLES = ("byte-level", "byte-fallback", "byte-fallback-unstripped", "metaspace-bytes", "metaspace")


def _byte_level() -> Tokenizer:
    """Every byte, some words, and an emoji in three pieces, as GPT-2 and SmolLM2 have it."""
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    emoji = spell("😀")[0][0]
    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [spell(word)[0][0] for word in WORDS if len(word.encode()) > 1] + [emoji[:2]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<plain>", special=False)])
    return tokenizer


def _pieces(decoder: Any) -> Tokenizer:
    """Byte tokens and pieces with a visible space, as SentencePiece models have them."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    vocabulary = {t: i for i, t in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoder
    return tokenizer


def make_tokenizer(style: str) -> PreTrainedTokenizerFast:
    """A tokenizer of one of STYLES."""
    spaces, runs = decoders.Replace("▁", " "), [decoders.ByteFallback(), decoders.Fuse()]
    inner = {
        "byte-level": _byte_level,
        "byte-fallback": lambda: _pieces(decoders.Sequence([spaces, *runs, decoders.Strip(" ", 1, 0)])),
        "byte-fallback-unstripped": lambda: _pieces(decoders.Sequence([spaces, *runs])),
        "metaspace-bytes": lambda: _pieces(
            decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
        ),
        "metaspace": lambda: _pieces(decoders.Metaspace()),
    }[style]()
    inner.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def byte_level() -> PreTrainedTokenizerFast:
    return make_tokenizer("byte-level")


@pytest.fixture(scope="session")
def byte_fallback() -> PreTrainedTokenizerFast:
    return make_tokenizer("byte-fallback")


@pytest.fixture(scope="session", params=STYLES)
def any_tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return make_tokenizer(request.param)


class Speller:
    """Turns words and characters into ids of the byte-level tokenizer: whole words where it has them."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
        self._convert = tokenizer.convert_tokens_to_ids

    def word(self, text: str) -> int:
        return self._convert(self._spell(text)[0][0])

    def bytes_of(self, text: str) -> list[int]:
        return [self._convert(symbol) for symbol in self._spell(text)[0][0]]

    def emoji(self) -> list[int]:
        symbols = self._spell("😀")[0][0]
        return [self._convert(symbols[:2]), self._convert(symbols[2]), self._convert(symbols[3])]


@pytest.fixture(scope="session")
def speller(byte_level: PreTrainedTokenizerFast) -> Speller:
    return Speller(byte_level)
