"""Tokens on their own: their text and their bytes, as log-probabilities report them."""

from __future__ import annotations

from typing import Any

REPLACEMENT = "\ufffd"


class TokenTexts:
    """Texts of single tokens of one tokenizer; each is worked out once.

    Args:
        tokenizer: a Hugging Face tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        self._byte_of = _byte_alphabet()

    def text(self, token_id: int) -> str:
        """The token's text; parts of a character show as replacement characters."""
        found = self._texts.get(token_id)
        if found is None:
            found = self._texts[token_id] = self._tokenizer.decode(
                [token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        return found

    def bytes(self, token_id: int) -> list[int] | None:
        """The token's bytes in UTF-8; None where the tokenizer does not tell."""
        text = self.text(token_id)
        if REPLACEMENT not in text:
            return list(text.encode())
        name = self._tokenizer.convert_ids_to_tokens(token_id)
        if name is None:
            return None
        if name.startswith("<0x") and name.endswith(">") and len(name) == len("<0x00>"):
            return [int(name[3:5], 16)]
        if all(character in self._byte_of for character in name):
            return [self._byte_of[character] for character in name]
        return list(text.encode())


def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level BPE writes bytes: printable ones stand for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
