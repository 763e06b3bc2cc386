r"""Where words begin and end in a token sequence.

Words follow the default rules of Unicode Standard Annex 29 (the `regex` package's WORD flag): "don't", "3.14"
and "foo_bar" are one word, punctuation marks stand alone, a run of blanks is one unit. Only units with a
letter or a digit count as words; blanks and punctuation are free, so that ".\n\n", " = " and "    return" are
short phrases.

Scripts written without spaces have no default word boundaries: every character (with its marks) is a unit
there. A unit counts as part of a word: two ideographs or kana, or four Thai, Lao, Khmer or Burmese clusters,
make one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import regex
from numpy.typing import NDArray

from paceline.vocabularies.token_text import text_of

WORD_WEIGHT = 12
"""Weight of one word; units of scripts without spaces weigh a fraction of it."""

_BOUNDARY = regex.compile(r"\b", regex.V1 | regex.WORD)
_IDEOGRAPH = regex.compile(r"[\p{Script=Han}\p{Script=Hiragana}]")
_CLUSTER = regex.compile(r"[\p{Script=Thai}\p{Script=Lao}\p{Script=Khmer}\p{Script=Myanmar}]")


@dataclass(frozen=True, slots=True)
class WordEdges:
    """Words at the T + 1 edges of a sequence of T tokens (edge t lies before token t).

    Attributes:
        is_boundary: bool [T + 1], whether no word and no character goes across the edge.
        weight: int64 [T + 1], total weight of the words that end at or before the edge; the words of tokens i
            to j - 1 weigh `weight[j] - weight[i]` when edge j is a boundary (a word begun before i counts).
    """

    is_boundary: NDArray[np.bool_]
    weight: NDArray[np.int64]


def word_edges(pieces: list[bytes]) -> WordEdges:
    """Find word boundaries between the tokens of one text.

    Args:
        pieces: bytes of each token; tokens that are not text must be given as a blank or line break.
    """
    text = text_of(b"".join(pieces))
    cuts = _cuts(text)
    weights = [_weight(text[start:end]) for start, end in pairwise(cuts)]
    cut_bytes = _byte_offsets(text)[cuts]
    edge_bytes = np.cumsum([0, *map(len, pieces)])
    # Number of cuts at or before each edge; there is always one at 0.
    rank = np.searchsorted(cut_bytes, edge_bytes, side="right")
    weight = np.concatenate([[0], np.cumsum(weights, dtype=np.int64)])[rank - 1]
    return WordEdges(cut_bytes[rank - 1] == edge_bytes, weight)


def _cuts(text: str) -> NDArray[np.int64]:
    """Character offsets of all word boundaries, both ends included."""
    inner = [match.start() for match in _BOUNDARY.finditer(text)]
    return np.unique(np.array([0, *inner, len(text)], dtype=np.int64))


def _weight(unit: str) -> int:
    first = unit[0]
    if not (first.isalnum() or first == "_"):
        return 0
    if first < "\u0e00":
        return WORD_WEIGHT
    if _IDEOGRAPH.match(first):
        return WORD_WEIGHT // 2
    return WORD_WEIGHT // 4 if _CLUSTER.match(first) else WORD_WEIGHT


def _byte_offsets(text: str) -> NDArray[np.int64]:
    """Byte offset of every character of `text`, and of its end."""
    if text.isascii():
        return np.arange(len(text) + 1)
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    lengths = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    lengths[(points >= 0xDC80) & (points <= 0xDCFF)] = 1  # a lone surrogate stands for one byte
    return np.concatenate([[0], np.cumsum(lengths)])
