"""How fast answers came: counts and times over a whole evaluation."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from paceline.engine.generator import GenerationResult


class SpeedRecord:
    """Counts and times of all answers so far."""

    def __init__(self) -> None:
        self.num_answers = 0
        self.num_output_tokens = 0
        self.num_rounds = 0
        self.num_relaxed_tokens = 0
        self.seconds = 0.0

    def add(self, results: Seq[GenerationResult], seconds: float) -> None:
        """Count answers that took `seconds` together."""
        self.num_answers += len(results)
        self.seconds += seconds
        for result in results:
            self.num_output_tokens += result.statistics.num_output_tokens
            self.num_rounds += result.statistics.num_rounds
            self.num_relaxed_tokens += result.statistics.num_relaxed_tokens

    def as_dict(self) -> dict[str, int | float]:
        """The figures, ready for JSON; ratios are 0 when nothing was counted."""
        return {
            "num_answers": self.num_answers,
            "num_output_tokens": self.num_output_tokens,
            "num_relaxed_tokens": self.num_relaxed_tokens,
            "mean_acceptance_length": self.num_output_tokens / max(self.num_rounds, 1),
            "tokens_per_second": self.num_output_tokens / max(self.seconds, 1e-9),
        }

    def __str__(self) -> str:
        """One line."""
        figures = self.as_dict()
        return (
            f"{self.num_answers} answers of {self.num_output_tokens} tokens in all, "
            f"mean acceptance length {figures['mean_acceptance_length']:.2f}, "
            f"{figures['tokens_per_second']:.1f} tokens/s"
        )
