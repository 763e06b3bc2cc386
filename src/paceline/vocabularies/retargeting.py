"""How a tokenizer spells a phrase in the middle of a text."""

from __future__ import annotations

from typing import Any

from paceline.vocabularies.token_text import TokenText, bytes_of

_CONTEXTS = ("", "a", "\n", ".", "1")
"""Left contexts to try. A phrase alone comes first: byte-level tokenizers spell it as they do within a text.
SentencePiece puts a space in front of a text, so there the phrase has to follow something."""


def expand_in_context(phrase: str, tokenizer: Any, text: TokenText) -> tuple[int, ...] | None:
    """Tokens of `phrase` behind other text; None when no context leaves the phrase tokens of its own.

    Args:
        phrase: a string with its leading space, if it has one.
        tokenizer: a `transformers` tokenizer or a `tokenizers.Tokenizer`.
        text: its bytes.
    """
    spelling = bytes_of(phrase)
    if any("\udc80" <= character <= "\udcff" for character in phrase):
        return None
    for context in _CONTEXTS:
        before, both = _encode(tokenizer, context), _encode(tokenizer, context + phrase)
        ids = both[len(before) :]
        if both[: len(before)] == before and ids and text.join(ids) == spelling:
            return ids
    return None


def _encode(tokenizer: Any, string: str) -> tuple[int, ...]:
    encoded = tokenizer.encode(string, add_special_tokens=False)
    return tuple(encoded.ids if hasattr(encoded, "ids") else encoded)
