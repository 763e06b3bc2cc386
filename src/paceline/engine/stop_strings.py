"""Stop strings: where a text ends, in characters and in tokens.

A stop string may begin inside one token, end inside another and span several accepted blocks. The text is
searched as it grows; the earliest string to be completed counts (of several that end together, the longest),
so the answer does not depend on how many tokens a round brings.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from paceline.engine.text_decoder import TextDecoder


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A completed stop string: characters [start, end) of the text."""

    start: int
    end: int


class StopMatcher:
    """Searches a growing text for stop strings.

    Args:
        stop: non-empty strings.
    """

    def __init__(self, stop: Seq[str]) -> None:
        self._stop = tuple(stop)
        self._tail_len = max(map(len, self._stop), default=1) - 1
        self._tail = ""
        self._num_seen = 0

    def feed(self, text: str) -> StopMatch | None:
        """Add text; return the stop string that it completes first."""
        window = self._tail + text
        base = self._num_seen - len(self._tail)
        matches = []
        for stop in self._stop:
            start = window.find(stop)
            if start >= 0:
                matches.append(StopMatch(base + start, base + start + len(stop)))
        self._num_seen += len(text)
        self._tail = window[max(len(window) - self._tail_len, 0) :]
        return min(matches, key=lambda match: (match.end, match.start), default=None)

    @property
    def num_held(self) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        for length in range(len(self._tail), 0, -1):
            ending = self._tail[-length:]
            if any(stop.startswith(ending) for stop in self._stop):
                return length
        return 0


class StopChecker:
    """Finds the token that completes a stop string; `find_stop` is what a Sequence calls.

    Args:
        tokenizer: a Hugging Face tokenizer.
        stop: non-empty strings.
        decoder: a fresh one of that tokenizer to copy; made here when absent.
    """

    def __init__(self, tokenizer: Any, stop: Seq[str], decoder: TextDecoder | None = None) -> None:
        self._decoder = decoder.copy() if decoder else TextDecoder(tokenizer)
        self._matcher = StopMatcher(stop)
        self._num_chars = 0
        # Special tokens are not part of the text, so a stop string that names one is matched by its id.
        specials = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
        self._stop_ids = frozenset(token_id for token, token_id in specials if token in stop)

    def find_stop(self, output_ids: Seq[int], num_before: int) -> int | None:
        """Search the text of the newest ids.

        Args:
            output_ids: all emitted ids.
            num_before: how many of them earlier calls have seen.

        Returns:
            Number of ids to keep, the last of which completes a stop string; None while there is none.
        """
        by_id = next((i for i in range(num_before, len(output_ids)) if output_ids[i] in self._stop_ids), None)
        by_text = self._find_in_text(output_ids, num_before)
        if by_id is None:
            return by_text
        return by_id + 1 if by_text is None else min(by_text, by_id + 1)

    def _find_in_text(self, output_ids: Seq[int], num_before: int) -> int | None:
        """`find_stop` for strings of the text."""
        new_ids = output_ids[num_before:]
        replay = self._decoder.copy()
        text = self._decoder.push(new_ids)
        match = self._matcher.feed(text)
        num_chars = self._num_chars
        self._num_chars += len(text)
        if match is None:
            return None
        for number, token_id in enumerate(new_ids, start=num_before + 1):
            num_chars += len(replay.push([token_id]))
            if num_chars >= match.end:
                return number
        return len(output_ids)
