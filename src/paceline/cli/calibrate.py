"""`paceline calibrate`: choose a regret budget for one's own target, drafter and prompts."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from paceline.cli.console import notice, notices, output
from paceline.cli.option_groups import expand_options
from paceline.cli.options import ModelOptions
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.bench.calibration import Calibration, Suggestion


@expand_options
def calibrate(
    out: Annotated[Path, Option(help="Folder for calibration.json and regret.png.")],
    model: ModelOptions,
    data: Annotated[
        Path | None, Option(help="A .jsonl file of prompts, not a benchmark's; by default our own 24.")
    ] = None,
    limit: Annotated[int | None, Option(help="Prompts, evenly spaced over the file.")] = 40,
    max_new_tokens: Annotated[int, Option(help="Most tokens of an answer.")] = 128,
    percentile: Annotated[
        float, Option(help="Share of rejections, in percent, that the gate should let through.")
    ] = 25.0,
    loss_per_token: Annotated[
        float, Option(help="Wanted loss of log-probability per token, in nats.")
    ] = 0.02,
    value_horizon: Annotated[int, Option(help="Depth up to which tokens are at stake.")] = 7,
) -> None:
    """Measure what strict verification rejects, and suggest limits for --verifier budgeted."""
    from dataclasses import replace

    from paceline.bench.calibration import BUDGETED, calibrate
    from paceline.bench.calibration_report import write_calibration
    from paceline.bench.metadata import run_metadata
    from paceline.bench.suites import load_suite
    from paceline.relaxation import Relaxation

    if data is not None and not (data.is_file() and data.suffix == ".jsonl"):
        raise ConfigError(f"--data is {str(data)!r}: give a .jsonl file of prompts")
    limits = Relaxation().updated({"value_horizon": value_horizon})
    suite = load_suite("builtin" if data is None else data.stem, None if data is None else data.parent, limit)
    if model.verifier not in (None, BUDGETED):
        raise ConfigError(f"--verifier is {model.verifier!r}: limits are measured for {BUDGETED!r} only")
    generator = replace(model, verifier=BUDGETED).load()
    prompts = [generator.encode(prompt.turns[0]) for prompt in suite.prompts]
    with progress(len(prompts)) as on_answer:
        found = calibrate(
            generator, prompts, max_new_tokens=max_new_tokens, limits=limits, on_answer=on_answer
        )
    suggestions = {
        f"percentile {percentile:g}": found.by_percentile(percentile),
        f"loss {loss_per_token:g} a token": found.by_loss(loss_per_token),
    }
    settings = {"target": model.target, "drafter": model.drafter, "suite": suite.name, "digest": suite.digest}
    run = run_metadata(shlex.join(["paceline", *sys.argv[1:]]), settings)
    paths = write_calibration(out, found, suggestions, run)
    print_calibration(found, suggestions)
    notice(f"written: {', '.join(str(path) for path in paths)}")


@contextmanager
def progress(num_prompts: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error with an estimate of the time left."""
    from rich.progress import Progress

    with Progress(console=notices()) as bar:
        task = bar.add_task("answers", total=num_prompts)
        yield lambda number: bar.update(task, completed=number)


def print_calibration(found: Calibration, suggestions: Mapping[str, Suggestion]) -> None:
    """The figures as tables on standard output."""
    from rich.table import Table

    from paceline.bench.calibration_report import summary

    figures = summary(found)
    console = output()
    console.print(
        f"{found.num_answers} answers, {found.num_tokens} tokens, {found.num_rounds} drafted rounds; they "
        f"ended at {', '.join(f'{reason} ({count})' for reason, count in figures['reasons'].items())}"
    )
    table = Table("percentile", *figures["regret_percentiles"])
    for name in ("regret", "regret_per_value"):
        values = figures[f"{name}_percentiles"].values()
        table.add_row(name.replace("_", " "), *[f"{value:.3f}" for value in values])
    console.print(table)
    for name, limits in suggestions.items():
        console.print(
            f"{name}: --max-regret-per-value {limits.max_regret_per_value:.4f} lets "
            f"{limits.relaxed_share:.0%} of rejections through; "
            f"--risk-budget {limits.risk_budget:.2f} for an answer of average length, or "
            f"--risk-budget 0 --risk-budget-per-token {limits.risk_budget_per_token:.4f}"
        )
