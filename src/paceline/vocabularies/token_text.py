"""The bytes behind every token of a tokenizer, so that text can be followed token by token.

A tokenizer's own `decode` drops leading spaces and replaces incomplete characters; phrases need the exact
bytes. Byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM2) writes each byte as one printable character;
SentencePiece (Gemma, Llama 2, Mistral) writes spaces as U+2581 and unknown bytes as `<0xNN>`. Which of the
two it is can be read off the vocabulary itself: byte-level tokens that begin a word begin with U+0120, the
stand-in of the space.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

_SENTENCEPIECE_SPACE = "\u2581"
_BYTE_LEVEL_SPACE = "\u0120"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class TokenText:
    """Bytes of every token id.

    Attributes:
        pieces: bytes of each id; empty where the tokenizer has no token.
        special_ids: control tokens (end of text, turns of a chat): they are not text.
    """

    pieces: tuple[bytes, ...]
    special_ids: frozenset[int]

    def __len__(self) -> int:
        """One more than the largest token id."""
        return len(self.pieces)

    def join(self, token_ids: list[int] | tuple[int, ...]) -> bytes:
        """Bytes of a run of tokens."""
        return b"".join([self.pieces[token_id] for token_id in token_ids])

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the mapping from ids to text."""
        digest = hashlib.sha256()
        for piece in self.pieces:
            digest.update(len(piece).to_bytes(4, "little") + piece)
        digest.update(repr(sorted(self.special_ids)).encode())
        return digest.hexdigest()[:32]


def token_text(tokenizer: Any) -> TokenText:
    """Read the bytes of every token.

    Args:
        tokenizer: a `transformers` tokenizer or a `tokenizers.Tokenizer`.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    added: dict[int, Any] = (
        tokenizer.get_added_tokens_decoder()
        if hasattr(tokenizer, "get_added_tokens_decoder")
        else tokenizer.added_tokens_decoder
    )
    is_byte_level = _is_byte_level(vocabulary)
    pieces = [b""] * (max([*vocabulary.values(), *added], default=-1) + 1)
    table = _bytes_by_character()
    for token, token_id in vocabulary.items():
        pieces[token_id] = _from_byte_level(token, table) if is_byte_level else _from_sentencepiece(token)
    for token_id, token in added.items():
        content = str(token.content)
        pieces[token_id] = content.encode() if is_byte_level else _from_sentencepiece(content)
    return TokenText(tuple(pieces), frozenset(i for i, token in added.items() if token.special))


def text_of(piece: bytes) -> str:
    """Bytes as a string; bytes that are no UTF-8 become lone surrogates, so that nothing is lost."""
    return piece.decode("utf-8", "surrogateescape")


def bytes_of(text: str) -> bytes:
    """The inverse of `text_of`."""
    return text.encode("utf-8", "surrogateescape")


def _is_byte_level(vocabulary: dict[str, int]) -> bool:
    """Whether spaces are written the byte-level way rather than SentencePiece's."""
    num_byte_level = sum(token.startswith(_BYTE_LEVEL_SPACE) for token in vocabulary)
    return num_byte_level > sum(token.startswith(_SENTENCEPIECE_SPACE) for token in vocabulary)


def _from_sentencepiece(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace(_SENTENCEPIECE_SPACE, " ").encode()


def _from_byte_level(token: str, table: dict[str, int]) -> bytes:
    try:
        return bytes([table[character] for character in token])
    except KeyError:
        # A token added as plain text, not spelled in the byte alphabet.
        return token.encode()


def _bytes_by_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, other bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in table]
    return table | {chr(0x100 + n): byte for n, byte in enumerate(others)}
