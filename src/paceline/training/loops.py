"""Where an answer starts to go round in circles.

Small models fall into loops, and a loop lasts until the answer is cut off. It teaches a head nothing but
that loop, with thousands of samples, and its words would take entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

WINDOW = 8
OCCURRENCES = 5


def loop_start(token_ids: Seq[int], window: int = WINDOW, occurrences: int = OCCURRENCES) -> int:
    """Number of tokens before the loop: what comes behind them is repetition; all of them without a loop.

    Args:
        token_ids: an answer.
        window: tokens that must come back exactly.
        occurrences: how often, the first time included.
    """
    counts: dict[tuple[int, ...], int] = {}
    for end in range(window, len(token_ids) + 1):
        gram = tuple(token_ids[end - window : end])
        counts[gram] = counts.get(gram, 0) + 1
        if counts[gram] == occurrences:
            return end
    return len(token_ids)
