"""The text of one answer as it grows: certain pieces, without special tokens, cut at a stop string."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from paceline.engine.stop_strings import StopMatcher
from paceline.engine.text_decoder import TextDecoder


class IncrementalDetokenizer:
    """Turns emitted ids into text pieces; joined, they are the decoded text up to the stop string.

    Text that could still turn out to be the beginning of a stop string, and characters that are not complete,
    are held back until the next piece or the end.

    Args:
        decoder: a fresh one; it is copied, so that one serves all answers of a tokenizer.
        stop: strings at which the text ends.
        include_stop_string: end the text behind the stop string instead of before it.
    """

    def __init__(
        self,
        decoder: TextDecoder,
        *,
        stop: Seq[str] = (),
        include_stop_string: bool = False,
    ) -> None:
        self._decoder = decoder.copy()
        self._matcher = StopMatcher(stop)
        self._include_stop_string = include_stop_string
        self._held = ""
        self._num_released = 0
        self._is_stopped = False

    def push(self, ids: Seq[int]) -> str:
        """Add emitted ids; return the text that may be shown."""
        return "" if self._is_stopped else self._release(self._decoder.push(ids))

    def finish(self) -> str:
        """The rest of the text, when no more ids will come."""
        if self._is_stopped:
            return ""
        piece = self._release(self._decoder.finish())
        if not self._is_stopped:
            piece, self._held = piece + self._held, ""
        return piece

    def _release(self, text: str) -> str:
        """Add certain text; return what cannot belong to a stop string."""
        self._held += text
        match = self._matcher.feed(text)
        if match is None:
            num_free = len(self._held) - self._matcher.num_held
        else:
            self._is_stopped = True
            num_free = (match.end if self._include_stop_string else match.start) - self._num_released
        piece, self._held = self._held[:num_free], self._held[num_free:]
        self._num_released += len(piece)
        return piece
