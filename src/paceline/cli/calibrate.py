"""`paceline calibrate`: choose a regret budget for one's own target, drafter and prompts."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    from paceline.bench.limit_trials import Trial


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
    regret_prices: Annotated[
        str, Option(help="Prices of regret to decode with, by commas; empty for none.")
    ] = "2,3,4",
) -> None:
    """Measure what strict verification rejects, decode with a few prices of regret, and suggest limits."""
    from dataclasses import replace

    from paceline.bench.calibration import BUDGETED, calibrate
    from paceline.bench.calibration_report import write_calibration
    from paceline.bench.limit_trials import try_limits
    from paceline.bench.metadata import run_metadata
    from paceline.bench.suites import load_suite, read_suite
    from paceline.relaxation import Relaxation

    if not 0 < percentile <= 100 or not loss_per_token > 0:
        raise ConfigError(
            f"--percentile is {percentile:g}, --loss-per-token {loss_per_token:g}: one must be above 0 and "
            "at most 100, the other above 0"
        )
    suite = load_suite("builtin", None, limit) if data is None else read_suite(data, limit)
    limits = Relaxation().updated({"value_horizon": value_horizon})
    candidates = [
        limits.updated({"regret_price": price}) for price in _numbers("regret-prices", regret_prices)
    ]
    if model.verifier not in (None, BUDGETED):
        raise ConfigError(f"--verifier is {model.verifier!r}: limits are measured for {BUDGETED!r} only")
    generator = replace(model, verifier=BUDGETED).load()
    prompts = [generator.encode(prompt.turns[0]) for prompt in suite.prompts]
    with progress("answers", len(prompts)) as on_answer:
        found = calibrate(
            generator, prompts, max_new_tokens=max_new_tokens, limits=limits, on_answer=on_answer
        )
    trials = []
    if candidates:
        with progress("trials", len(prompts) * (len(candidates) + 1)) as on_answer:
            trials = try_limits(
                generator, prompts, candidates, max_new_tokens=max_new_tokens, on_answer=on_answer
            )
    suggestions = {
        f"percentile {percentile:g}": found.by_percentile(percentile),
        f"loss {loss_per_token:g} a token": found.by_loss(loss_per_token),
    }
    settings = {"target": model.target, "drafter": model.drafter, "suite": suite.name, "digest": suite.digest}
    run = run_metadata(shlex.join(["paceline", *sys.argv[1:]]), settings)
    paths = write_calibration(out, found, suggestions, run, trials)
    print_calibration(found, suggestions, value_horizon)
    if trials:
        print_trials(trials, loss_per_token, value_horizon)
    notice(f"written: {', '.join(str(path) for path in paths)}")


def _numbers(option: str, text: str) -> list[float]:
    """Numbers between commas; ConfigError names the option otherwise."""
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"--{option} is {text!r}: give numbers, separated by commas") from None


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error with an estimate of the time left."""
    from rich.progress import Progress

    with Progress(console=notices()) as bar:
        task = bar.add_task(what, total=total)
        yield lambda number: bar.update(task, completed=number)


def print_calibration(found: Calibration, suggestions: Mapping[str, Suggestion], value_horizon: int) -> None:
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
            f"{name}: --max-regret-per-value {_rounded_up(limits.max_regret_per_value)}"
            f"{_horizon(value_horizon)} lets {limits.relaxed_share:.0%} of rejections through; "
            f"--risk-budget {limits.risk_budget:.2f} for an answer of average length, or "
            f"--risk-budget 0 --risk-budget-per-token {limits.risk_budget_per_token:.4f}"
        )


def _horizon(value_horizon: int) -> str:
    """The option, where it is not the default: limits go with the horizon that they were found for."""
    from paceline.relaxation import DEFAULT_VALUE_HORIZON

    return "" if value_horizon == DEFAULT_VALUE_HORIZON else f" --value-horizon {value_horizon}"


def _rounded_up(gate: float) -> str:
    """Four decimals, never below: the gate is the ratio of rejections that it was chosen to let through."""
    return f"{math.ceil(gate * 1e4) / 1e4:.4f}"


def print_trials(trials: Sequence[Trial], loss_per_token: float, value_horizon: int) -> None:
    """What every price brought and cost, and which one to take."""
    from rich.table import Table

    from paceline.bench.figures import figure
    from paceline.bench.limit_trials import best_within

    console = output()
    table = Table("price", "accepted a round", "x strict", "regret a token", "log-probability a token")
    for trial in trials:
        table.add_row(
            f"{trial.limits.regret_price:g}",
            f"{trial.accepted_per_round:.2f}",
            figure(trial.gain, 2),
            f"{trial.regret_per_token:.4f}",
            figure(trial.log_prob_change, 4, is_signed=True),
        )
    console.print(table)
    best = best_within(trials, loss_per_token)
    console.print(
        f"no price is sure to lose less than {loss_per_token:g} a token: try higher ones, or more prompts"
        if best is None
        else f"most accepted with a loss below {loss_per_token:g} a token: --regret-price "
        f"{best.limits.regret_price:g}{_horizon(value_horizon)}, with the default gate and budget"
    )
