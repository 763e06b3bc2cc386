"""Where commands print: answers go to standard output, everything about them to standard error."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from paceline.engine.stats import GenerationStatistics

LOG_WIDTH = 200


def output() -> Console:
    """Console on standard output (made per command, so that redirections are seen)."""
    console = Console(soft_wrap=True, highlight=False)
    # A file or a pipe has no width: tables are not folded for it.
    return console if console.is_terminal else Console(soft_wrap=True, highlight=False, width=LOG_WIDTH)


def notices() -> Console:
    """Console on standard error."""
    return Console(stderr=True, soft_wrap=True, highlight=False)


def notice(text: str) -> None:
    """Tell the user something that is not part of the answer."""
    print(text, file=sys.stderr, flush=True)


def summary(statistics: GenerationStatistics) -> str:
    """One line on how an answer came about."""
    relaxed = ""
    if statistics.num_relaxed_tokens:
        relaxed = (
            f", {statistics.num_relaxed_tokens} of them relaxed for a regret of {statistics.regret_spent:.2f}"
        )
    return (
        f"{statistics.num_output_tokens} tokens in {statistics.seconds:.1f} s: "
        f"{statistics.tokens_per_second:.1f} tokens/s, {statistics.num_rounds} rounds, "
        f"{statistics.mean_acceptance_length:.2f} tokens a round{relaxed}"
    )


def print_stages(reported: Mapping[str, Mapping[str, Any]]) -> None:
    """What each stage of a training run reported, for a person."""
    console = output()
    for stage, figures in reported.items():
        console.print(f"{stage}:")
        for name, value in figures.items():
            console.print(f"  {name}: {value:,}" if isinstance(value, int) else f"  {name}: {value}")
