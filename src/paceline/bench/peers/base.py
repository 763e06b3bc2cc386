"""What a rival is: one more arm, with arithmetic of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from paceline.bench.arms import Arm


class PeerArm(Arm, Protocol):
    """Another program that decodes the same model greedily.

    Its ids may differ from `generate()` wherever its rounding does; nothing judges those differences.
    """

    @property
    def description(self) -> Mapping[str, str | int]:
        """What a reader must know: `software` with its version, `weights` (their precision), `threads`."""
