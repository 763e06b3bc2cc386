"""Where the newest tokens of a text have occurred before: an index that grows with the text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NgramMatch:
    """An earlier occurrence of the end of the text.

    Attributes:
        size: number of tokens that agree (at most the index's largest n).
        end: position behind the earlier occurrence: its continuation starts there.
    """

    size: int
    end: int


class NgramIndex:
    """Positions of all n-grams of a text. Adding a token costs a few dictionary entries, whatever the length.

    Args:
        min_size: smallest n.
        max_size: largest n.
        num_kept: newest occurrences to remember of each n-gram.
    """

    def __init__(self, min_size: int = 1, max_size: int = 3, num_kept: int = 4) -> None:
        self._sizes = range(max_size, min_size - 1, -1)
        self._num_kept = num_kept
        self._token_ids: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def __len__(self) -> int:
        """Tokens seen."""
        return len(self._token_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Add tokens to the text."""
        text, ends = self._token_ids, self._ends
        for token_id in token_ids:
            # An n-gram is entered once it has a continuation, so the end of the text never matches itself.
            end = len(text)
            for size in self._sizes:
                if size <= end:
                    known = ends.setdefault(tuple(text[end - size :]), [])
                    known.append(end)
                    if len(known) > self._num_kept:
                        del known[0]
            text.append(token_id)

    def matches(self) -> list[NgramMatch]:
        """Earlier occurrences of the end of the text: longest first, then newest first, each place once."""
        found: dict[int, NgramMatch] = {}
        for size in self._sizes:
            if size <= len(self._token_ids):
                for end in reversed(self._ends.get(tuple(self._token_ids[-size:]), [])):
                    found.setdefault(end, NgramMatch(size, end))
        return list(found.values())

    def continuation(self, end: int, length: int) -> list[int]:
        """The `length` tokens from `end` on; past the end of the text the copy goes on with itself."""
        copied = self._token_ids[end : end + length]
        if len(copied) < length:
            repeats = -(-length // len(copied))
            copied = (copied * repeats)[:length]
        return copied
