"""Fixed shapes for decoding rounds: every round is padded to the next one, so that few shapes exist.

A captured forward computes one shape only. Rounds differ in sequences, tree widths and cached lengths, so
each of the three is rounded up: the batch to a power of two, the width to one of `WIDTHS`, the positions that
attention reads to a step of at most a quarter of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from paceline.sequence import Segment

WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 65, 96, 129)
"""Rows per sequence; 65 are a tree of 64 drafted nodes. `engine.forward_cost` measures at the same widths, so
that the node budget knows what each bucket costs."""
MAX_WIDTH = WIDTHS[-1]
VIEW_STEP = 256
"""Least step of the positions that attention reads; also keeps the mask's rows aligned."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Shape of one static forward.

    Attributes:
        batch_size: sequences B: cache slots 0 to B - 1.
        width: rows per sequence W.
        view_len: positions that attention reads S.
    """

    batch_size: int
    width: int
    view_len: int

    @classmethod
    def of(cls, segments: Seq[Segment], slots: Seq[int], starts: Seq[int]) -> Bucket:
        """The smallest one that holds trees of at most `MAX_WIDTH` rows.

        Args:
            segments: one per sequence.
            slots: cache slot of each.
            starts: cached tokens of each.
        """
        ends = [start + len(segment) for start, segment in zip(starts, segments, strict=True)]
        width = WIDTHS[bisect_left(WIDTHS, max(map(len, segments)))]
        return cls(next_power_of_two(max(slots) + 1), width, rounded_view_len(max(ends)))


def next_power_of_two(number: int) -> int:
    """Least power of two that is not below `number`, at least 1."""
    return 1 << max(number - 1, 0).bit_length()


def rounded_view_len(length: int) -> int:
    """`length` rounded up: in steps of 256, of 512 from 2048 on, of 1024 from 4096 on, and so on.

    Beyond 1024, at most a quarter of the length is read for nothing, and a text meets four new shapes each
    time its length doubles.
    """
    step = max(VIEW_STEP, next_power_of_two(length + 1) // 8)
    return -(-max(length, 1) // step) * step
