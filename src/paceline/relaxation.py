"""How far lossy verifiers may leave the target's own choice, as a request states it.

The budgeted rule is that of ASD (approximate speculative decoding with one regret budget per request; its
authors report a patent application). Regret is the largest logit of a position minus the drafted token's,
before any temperature: by exactly that the token's log-probability under the target is below the argmax's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

from paceline.config import check_known, nearest_name
from paceline.errors import ConfigError, RequestError

DEFAULT_VALUE_HORIZON = 7
DEFAULT_REGRET_PRICE = 4.0
"""Tokens that a logit of regret must bring; chosen on training prompts, see docs/algorithms/budgeted.md."""


@dataclass(frozen=True, slots=True)
class Relaxation:
    """Limits of the verifiers `budgeted`, `typical` and `margin`; strict verifiers ignore all of it.

    Attributes:
        risk_budget: regret that a whole request may spend, in logits; 0 is strict decoding unless every token
            adds to it.
        risk_budget_per_token: what is added to that with every emitted token, so that long answers go on
            profiting; finite.
        max_regret_per_value: most regret of one token per unit of suffix value; 0 is strict decoding.
        max_relaxed_tokens_per_block: most relaxed tokens a round; 0 is strict decoding.
        value_horizon: D; a drafted token at depth d (1 behind the root) has suffix value D - d + 1, whatever
            the tree at hand looks like, and beyond D none.
        is_value_normalised: suffix values are divided by D.
        regret_price: tokens that a path must yield more for every logit of regret that it costs more; 0
            takes the longest path whatever it costs; finite.
        typical_epsilon: probability that is always enough for verifier `typical`.
        typical_delta: the factor of exp(-entropy) that is enough there as well.
        max_regret: most regret of one token for verifier `margin`.
    """

    risk_budget: float = 8.0
    risk_budget_per_token: float = 0.0
    max_regret_per_value: float = 0.25
    max_relaxed_tokens_per_block: int = 2
    value_horizon: int = DEFAULT_VALUE_HORIZON
    is_value_normalised: bool = False
    regret_price: float = DEFAULT_REGRET_PRICE
    typical_epsilon: float = 0.3
    typical_delta: float = 0.09
    max_regret: float = 0.5

    def __post_init__(self) -> None:
        """Refuse values out of range, naming the field, the value and the range."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "is_value_normalised":
                if not isinstance(value, bool):
                    raise RequestError(f"{field.name} is {value!r}: it must be true or false")
            elif isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise RequestError(f"{field.name} is {value!r}: it must be a number of at least 0")
        for name in ("risk_budget_per_token", "regret_price"):
            if getattr(self, name) == float("inf"):
                raise RequestError(f"{name} is inf: it must be finite")
        if not isinstance(self.value_horizon, int) or self.value_horizon < 1:
            raise RequestError(
                f"value_horizon is {self.value_horizon!r}: it must be a whole number of at least 1"
            )
        if not isinstance(self.max_relaxed_tokens_per_block, int):
            raise RequestError(
                f"max_relaxed_tokens_per_block is {self.max_relaxed_tokens_per_block!r}: it must be a whole "
                "number"
            )

    @property
    def has_budget(self) -> bool:
        """Whether any regret may be spent at all."""
        return self.risk_budget > 0 or self.risk_budget_per_token > 0

    @property
    def is_strict(self) -> bool:
        """Whether the budgeted verifier keeps nothing but the argmax, equal logits included."""
        return not (
            self.has_budget and self.max_regret_per_value > 0 and self.max_relaxed_tokens_per_block > 0
        )

    def allowance(self, num_output_tokens: int) -> float:
        """Regret that a request may have spent once it has so many output tokens."""
        return self.risk_budget + self.risk_budget_per_token * num_output_tokens

    def updated(self, changes: Mapping[str, object]) -> Relaxation:
        """Copy with `changes`; unknown names raise ConfigError naming the nearest known one."""
        known = [field.name for field in fields(self)]
        for name in changes:
            if name not in known:
                raise ConfigError(f"unknown limit {name!r}: did you mean {nearest_name(name, known)!r}?")
        return replace(self, **changes)  # type: ignore[arg-type]

    @classmethod
    def preset(cls, name: str) -> Relaxation:
        """A named set of limits; ConfigError names the nearest known one."""
        check_known("preset", name, PRESETS)
        return PRESETS[name]


DEFAULT_RELAXATION = Relaxation()

PRESETS: Mapping[str, Relaxation] = MappingProxyType(
    {
        "stable": DEFAULT_RELAXATION,
        "discovery": Relaxation(risk_budget=12.0, max_regret_per_value=0.5, regret_price=1.0),
        # With normalised values the published pair is one number twice: the 25th percentile of regret over
        # value at the first rejection, measured for another target. `paceline calibrate` finds it for one's
        # own. (That variant also refuses equal logits once its budget is spent to the last bit.)
        "normalised": Relaxation(
            risk_budget=2.0625,
            max_regret_per_value=2.0625,
            max_relaxed_tokens_per_block=1,
            value_horizon=5,
            is_value_normalised=True,
            regret_price=0.0,
        ),
    }
)
"""Published profiles of the budgeted verifier; the price of regret, which trees need, is ours."""
