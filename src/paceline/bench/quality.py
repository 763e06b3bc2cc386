"""Properties of an answer that need nothing but its tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

NGRAM_SIZE = 4


@dataclass(frozen=True, slots=True)
class Repetition:
    """How much an answer repeats itself.

    Attributes:
        num_ngrams: groups of `NGRAM_SIZE` successive tokens.
        num_repeated: those that stand further up in the same answer.
    """

    num_ngrams: int
    num_repeated: int


def repeated_ngrams(token_ids: Seq[int], size: int = NGRAM_SIZE) -> Repetition:
    """Count the n-grams of an answer that have occurred before in it."""
    ngrams = [tuple(token_ids[i : i + size]) for i in range(len(token_ids) - size + 1)]
    return Repetition(len(ngrams), len(ngrams) - len(set(ngrams)))
