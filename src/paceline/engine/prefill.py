"""How much of a prompt is read at once: as much as fits a forward, or little, so that others wait briefly.

While a prompt is read nobody else gets a token, so a server reads long ones in pieces of a given time.
"""

from __future__ import annotations

from typing import Protocol

from paceline.errors import ConfigError

PREFILL_CHUNK = 512
"""Most prompt tokens of one forward."""
LEAST_CHUNK = 16
WHOLE_LEN = 96
"""Tokens up to which a prompt, or the end of one, is read at once, however short pieces are: several forwards
take far longer, since each costs something beside its tokens."""
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
