"""Verifiers as a benchmark names them: a registered name, and for lossy ones the limits behind a colon."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config import check_known
from paceline.errors import ConfigError
from paceline.registry import verifier_class, verifier_names
from paceline.relaxation import DEFAULT_RELAXATION, PRESETS, Relaxation

# Verifier -> the limits that its numbers stand for, in order.
_NUMBERS = {
    "budgeted": (
        "risk_budget",
        "max_regret_per_value",
        "max_relaxed_tokens_per_block",
        "risk_budget_per_token",
        "regret_price",
    ),
    "typical": ("typical_epsilon", "typical_delta"),
    "margin": ("max_regret",),
}


@dataclass(frozen=True, slots=True)
class VerifierSpec:
    """One verifier of a benchmark.

    Attributes:
        text: as it was asked for, such as `budgeted:12/0.5/2`; what the report shows.
        name: registered name.
        relaxation: its limits.
    """

    text: str
    name: str
    relaxation: Relaxation = DEFAULT_RELAXATION

    @property
    def is_lossy(self) -> bool:
        """Whether the text may differ from plain decoding's."""
        return not verifier_class(self.name).lossless

    @classmethod
    def read(cls, text: str) -> VerifierSpec:
        """Read `NAME`, `budgeted:PRESET`, or `NAME:NUMBER/NUMBER...`.

        Raises:
            ConfigError: the name or preset is unknown, or there are no such limits.
        """
        name, _, limits = text.partition(":")
        check_known("verifier", name, verifier_names())
        if not limits:
            return cls(name, name)
        known = _NUMBERS.get(name)
        if known is None:
            raise ConfigError(f"verifier {text!r}: {name!r} has no limits to give behind a colon")
        if name == "budgeted" and limits in PRESETS:
            return cls(text, name, Relaxation.preset(limits))
        numbers = limits.split("/")
        try:
            values = [float(number) for number in numbers]
        except ValueError:
            values = []
        if not 0 < len(values) <= len(known):
            presets = f", or one of {', '.join(PRESETS)}" if name == "budgeted" else ""
            raise ConfigError(f"verifier {text!r}: give {'/'.join(known)} as numbers{presets}")
        changes: dict[str, object] = dict(zip(known, values, strict=False))
        cap = changes.get("max_relaxed_tokens_per_block")
        if isinstance(cap, float) and cap.is_integer():
            changes["max_relaxed_tokens_per_block"] = int(cap)
        return cls(text, name, DEFAULT_RELAXATION.updated(changes))
