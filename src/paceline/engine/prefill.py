"""Whose prompt is read next and how much of it: what fits a forward, or little, so that others wait briefly.

While a prompt is read nobody else gets a token, so a server reads long ones in pieces of a given time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from paceline.errors import ConfigError
from paceline.sequence import Sequence

PREFILL_CHUNK = 512
"""Most prompt tokens of one forward."""
LEAST_CHUNK = 16
WHOLE_LEN = 96
"""Tokens up to which a prompt, or the end of one, is read at once, however short pieces are: several forwards
take far longer, since each costs something beside its tokens."""
MAX_PASSED_OVER = 3
"""Pieces of shorter prompts that are read in a row while a longer one waits."""
SPEED_WEIGHT = 0.3
"""Of the newest piece in what a token is taken to cost."""


class PrefillPace(Protocol):
    """Decides how many prompt tokens the next forward may hold."""

    @property
    def chunk_len(self) -> int:
        """So many."""

    def take(self, num_pending: int) -> int:
        """How many of one sequence's pending ones are read now."""

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn from a piece that was read."""


class FixedPace:
    """Always as many.

    Args:
        chunk_len: of a piece.
    """

    def __init__(self, chunk_len: int = PREFILL_CHUNK) -> None:
        if chunk_len < 1:
            raise ConfigError(f"prefill_chunk is {chunk_len}: it must be at least 1")
        self.chunk_len = chunk_len

    def take(self, num_pending: int) -> int:
        """See `PrefillPace`."""
        return min(num_pending, self.chunk_len)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Nothing is learned."""


class TimedPace:
    """Pieces that take about as long as asked for on this machine, by the newest ones.

    Args:
        seconds: of a piece.
        most: tokens of a piece at most.
    """

    def __init__(self, seconds: float, most: int = PREFILL_CHUNK) -> None:
        if not seconds > 0:
            raise ConfigError(f"prefill_seconds is {seconds}: it must be above 0")
        self._seconds, self._most = seconds, most
        self._whole_len = min(WHOLE_LEN, most)
        self.chunk_len = min(LEAST_CHUNK, most)

    def take(self, num_pending: int) -> int:
        """See `PrefillPace`."""
        return num_pending if num_pending <= max(self.chunk_len, self._whole_len) else self.chunk_len

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Go towards the length that would have taken as long as asked for, at most to twice this one."""
        if num_tokens < self.chunk_len:
            # The end of a prompt, or a short one: a forward costs something beside its tokens.
            return
        wanted = num_tokens * self._seconds / max(seconds, 1e-9)
        moved = self.chunk_len + SPEED_WEIGHT * (wanted - self.chunk_len)
        bounded = min(moved, 2.0 * self.chunk_len, self._most)
        self.chunk_len = max(min(LEAST_CHUNK, self._most), int(bounded))


class ReadingOrder:
    """Which of the prompts that arrived are read in a round."""

    def __init__(self) -> None:
        self._num_passed_over = 0

    def groups(
        self, pending: Mapping[Sequence, int], pace: PrefillPace, *, pads_rows: bool
    ) -> list[list[Sequence]]:
        """Those that share a forward, which holds at most a piece of prompt tokens.

        Those that fit into one come first: they are about to say something. Of the others only one reads,
        since everybody would wait for all of them.

        Args:
            pending: tokens that each still has to read, in the order of arrival.
            pace: how much of them a forward may hold.
            pads_rows: whether a forward computes as many rows for every sequence as for the widest one.
        """
        short = {s: n for s, n in pending.items() if n <= pace.chunk_len}
        groups: list[list[Sequence]] = []
        widths: list[int] = []
        for sequence, width in short.items():
            together = [*widths, width]
            num_rows = max(together) * len(together) if pads_rows else sum(together)
            if groups and num_rows <= pace.chunk_len:
                groups[-1].append(sequence)
                widths = together
            else:
                groups.append([sequence])
                widths = [width]
        long = [s for s in pending if s not in short]
        return [*groups, [self._next_to_read(long, pending)]] if long else groups

    def _next_to_read(self, long: list[Sequence], pending: Mapping[Sequence, int]) -> Sequence:
        """The one with the least left to read; now and then the one that came first, so that it ends too."""
        chosen = min(long, key=lambda sequence: pending[sequence])
        if chosen is not long[0] and self._num_passed_over == MAX_PASSED_OVER:
            chosen = long[0]
        self._num_passed_over = 0 if chosen is long[0] else self._num_passed_over + 1
        return chosen
