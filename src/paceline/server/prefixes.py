"""Caches of finished answers, kept for the next turn of their conversation.

A new prompt takes over the one that it agrees with longest; the least recently finished are dropped when
together they hold more tokens than they may.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq

from paceline.engine.generator import Answer

LEAST_SHARED = 16
"""Tokens below which reading them again costs less than a kept cache is worth."""


class PrefixCache:
    """Finished answers whose keys and values stay.

    Args:
        max_tokens: of all of them together; 0 keeps none.
        max_kept: how many: each of them holds a slot of the cache, however short it is.
        drop: frees the cache of one.
    """

    def __init__(self, max_tokens: int, max_kept: int, drop: Callable[[Answer], None]) -> None:
        self._max_tokens, self._max_kept, self._drop = max_tokens, max_kept, drop
        self._kept: OrderedDict[Answer, list[int]] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """Tokens that are kept now."""
        return sum(map(len, self._kept.values()))

    def take(self, prompt_ids: Seq[int]) -> Answer | None:
        """The answer whose tokens the prompt begins with longest; it is no longer kept here.

        An answer is only taken when most of it is used: its cache cannot serve two conversations.
        """
        best, longest = None, LEAST_SHARED - 1
        for answer, ids in self._kept.items():
            shared = _num_shared(ids, prompt_ids)
            if shared > longest and 2 * shared >= len(ids):
                best, longest = answer, shared
        if best is not None:
            del self._kept[best]
        return best

    def keep(self, answer: Answer) -> None:
        """Keep a finished answer's cache, or free it when there is no room."""
        self._kept[answer] = answer.sequence.token_ids
        while len(self._kept) > self._max_kept or (self._kept and self.num_tokens > self._max_tokens):
            oldest, _ = self._kept.popitem(last=False)
            self._drop(oldest)

    def clear(self) -> None:
        """Free all."""
        while self._kept:
            self._drop(self._kept.popitem()[0])


def _num_shared(left: Seq[int], right: Seq[int]) -> int:
    """Tokens that both begin with."""
    length = min(len(left), len(right))
    return next((i for i in range(length) if left[i] != right[i]), length)
