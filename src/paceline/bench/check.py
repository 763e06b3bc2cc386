"""The rounding check: in half precision every first difference from `model.generate` must be a near-tie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.bench.benchmark import BenchmarkOptions
from paceline.bench.near_ties import (
    NOISE_WIDTH,
    Difference,
    answered_sequences,
    find_differences,
    width_noise,
)
from paceline.bench.records import Journal
from paceline.bench.rows import REFERENCE, answers_of
from paceline.bench.runner import BenchmarkRunner, Progress
from paceline.engine.generator import Generator
from paceline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """What the check found.

    Attributes:
        threshold: largest gap that rounding explains on this model.
        num_answers: answers compared with the reference.
        differences: all first differences.
    """

    threshold: float
    num_answers: int
    differences: tuple[Difference, ...]

    @property
    def violations(self) -> tuple[Difference, ...]:
        """Differences that rounding does not explain."""
        return tuple(d for d in self.differences if not d.gap <= self.threshold)


def run_check(
    options: BenchmarkOptions,
    generator: Generator,
    *,
    target: str,
    out: Path | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> CheckOutcome:
    """Compare the engine's answers with Hugging Face `generate()`.

    Args:
        options: suites, drafters and lengths; `hf_generate` must be among the baselines.
        generator: holds the target.
        target: how the target was named.
        out: folder of the records, so that an interrupted check goes on; None keeps them in memory.
        on_progress: called before every measurement.
    """
    if REFERENCE not in options.baselines:
        raise ConfigError(f"baselines are {list(options.baselines)}: the check compares with {REFERENCE!r}")
    suites, arms = options.load_suites(), options.build_arms(generator)
    journal = Journal(out, options.settings(target, generator, suites, arms))
    runner = BenchmarkRunner(
        generator,
        arms,
        suites,
        journal,
        max_new_tokens=options.max_new_tokens,
        batch_sizes=options.batch_sizes,
    )
    runner.run(on_progress)
    judged = options.judged_arms(arms)
    records = [record for record in journal if record.key.arm in map(str, judged)]
    model = generator.target.model  # type: ignore[attr-defined]  # build_arms has checked it
    references = [record for record in records if record.key.arm.startswith(REFERENCE)]
    threshold = width_noise(model, answered_sequences(references))
    if threshold is None:
        raise ConfigError(f"no prompt and answer have more than {NOISE_WIDTH} tokens: raise --max-new-tokens")
    return CheckOutcome(
        threshold=threshold,
        num_answers=sum(len(answers_of([record])) for record in records)
        - sum(len(answers_of([record])) for record in references),
        differences=tuple(find_differences(records, judged, model)),
    )
