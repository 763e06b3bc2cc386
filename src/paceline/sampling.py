"""What a request may ask of decoding: lengths, stops, penalties, temperature and filters.

The order in which they act is Hugging Face's: penalties and bans on the logits of each position, then
temperature, top-k, top-p and min-p. Log-probabilities that are reported come from the target's own logits,
before all of this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from paceline.errors import ConfigError, RequestError
from paceline.grammar import Grammar
from paceline.relaxation import DEFAULT_RELAXATION, Relaxation

MIN_TEMPERATURE = 1e-37
"""Smaller numbers vanish in fp32, and logits divided by nothing are no numbers."""


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """One request's parameters; the defaults are plain greedy decoding.

    Attributes:
        max_new_tokens: most tokens to emit; None means up to the context limit.
        min_new_tokens: end-of-sequence ids are impossible before this many tokens.
        eos_token_ids: ids that end the text; None takes the model's own, () means none at all.
        stop: strings that end the text wherever they appear.
        include_stop_string: keep the stop string in the text.
        ignore_eos: never stop at an end-of-sequence id (fixed-work benchmarks).
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens (0: all).
        top_p: keep the smallest set of tokens whose probability reaches p (1: all).
        min_p: drop tokens below min_p times the likeliest one's probability (0: none).
        seed: key of all randomness of the request; None draws one from the operating system.
        repetition_penalty: divides positive and multiplies negative logits of every id seen in prompt or
            output.
        presence_penalty: subtracted once from the logit of every id in the output.
        frequency_penalty: subtracted once per occurrence in the output.
        logit_bias: id -> amount added to its logit.
        bad_words: id sequences that must not be completed.
        no_repeat_ngram_size: no n-gram of this size occurs twice in prompt and output (0: off).
        logprobs: number of alternatives to report beside each emitted token's log-probability; None reports
            nothing.
        relaxation: limits of lossy verifiers; the others ignore it.
        grammar: what texts the answer may be; needs an end-of-sequence id. Bans of this request that would
            leave none of what it allows, `min_new_tokens` behind a complete text among them, give way to it.
    """

    max_new_tokens: int | None = 256
    min_new_tokens: int = 0
    eos_token_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    include_stop_string: bool = False
    ignore_eos: bool = False
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    no_repeat_ngram_size: int = 0
    logprobs: int | None = None
    relaxation: Relaxation = DEFAULT_RELAXATION
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        """Refuse values out of range, naming the field, the value and the range."""
        stop: object = self.stop
        if isinstance(stop, str):
            object.__setattr__(self, "stop", (stop,))
        for name, is_good, wanted in self._checks():
            if not is_good:
                raise RequestError(f"{name} is {getattr(self, name)!r}: it must be {wanted}")

    def _checks(self) -> list[tuple[str, bool, str]]:
        """Field, whether its value is fine, and the range in words."""
        # Callers without a type checker pass a text or a number where a sequence is meant.
        bad_words: tuple[object, ...] = self.bad_words
        relaxation: object = self.relaxation
        grammar: object = self.grammar
        return [
            (
                "max_new_tokens",
                self.max_new_tokens is None or self.max_new_tokens >= 1,
                "at least 1, or None",
            ),
            ("min_new_tokens", self.min_new_tokens >= 0, "0 or more"),
            (
                "temperature",
                self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < float("inf"),
                f"0 (greedy), or {MIN_TEMPERATURE:g} or more",
            ),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0 (1 is off)"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2"),
            ("no_repeat_ngram_size", self.no_repeat_ngram_size >= 0, "0 (off) or more"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "between 0 and 20, or None"),
            (
                "stop",
                all(isinstance(text, str) and text for text in self.stop),
                "a list of non-empty strings",
            ),
            ("relaxation", isinstance(relaxation, Relaxation), "a Relaxation"),
            ("grammar", grammar is None or isinstance(grammar, Grammar), "a Grammar, or None"),
            (
                "bad_words",
                all(not isinstance(ids, str | int) and ids for ids in bad_words),
                "a list of non-empty id sequences",
            ),
            (
                "logit_bias",
                all(amount < float("inf") for amount in self.logit_bias.values()),
                "finite amounts, or -inf to ban a token",
            ),
        ]

    @property
    def is_greedy(self) -> bool:
        """Whether the argmax is taken at every position."""
        return self.temperature == 0

    def updated(self, changes: Mapping[str, object]) -> SamplingParameters:
        """Copy with `changes`; unknown names raise ConfigError naming the nearest known one."""
        from paceline.config import nearest_name

        known = [f.name for f in fields(self)]
        for name in changes:
            if name not in known:
                raise ConfigError(
                    f"unknown sampling parameter {name!r}: did you mean {nearest_name(name, known)!r}?"
                )
        return replace(self, **changes)  # type: ignore[arg-type]
