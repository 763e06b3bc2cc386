"""`paceline heads`: what is shipped, and what is inside a head folder."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.table import Table
from typer import Argument, Option

from paceline.cli.console import output

if TYPE_CHECKING:
    from paceline.heads.inspection import HeadSummary


def heads(
    path: Annotated[
        Path | None, Argument(help="Head folder to inspect; without one, the shipped heads.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the heads that are shipped, or inspect a head folder."""
    from paceline.heads.checkpoint import pretrained_heads
    from paceline.heads.inspection import inspect_head

    if path is not None:
        summary = inspect_head(path)
        print(json.dumps(as_object(summary), ensure_ascii=False)) if as_json else print_head(summary)
        return
    summaries = [inspect_head(folder) for folder in pretrained_heads()]
    if as_json:
        print(json.dumps([as_object(summary) for summary in summaries], ensure_ascii=False))
    elif not summaries:
        print("no heads are shipped with this installation")
    else:
        print_list(summaries)


def as_object(summary: HeadSummary) -> dict[str, object]:
    """A summary as JSON."""
    return {**asdict(summary), "path": str(summary.path)}


def print_list(summaries: list[HeadSummary]) -> None:
    """One line per head."""
    table = Table("head", "target", "type", "scores", "parameters", "size", "folder")
    for summary in summaries:
        table.add_row(
            summary.path.name,
            summary.path.parent.name,
            summary.head_type,
            summary.outputs,
            f"{summary.num_parameters / 1e6:.2f} M",
            f"{summary.num_bytes / 1e6:.1f} MB",
            str(summary.path),
        )
    output().print(table)


def print_head(summary: HeadSummary) -> None:
    """Everything about one head."""
    table = Table.grid(padding=(0, 2))
    table.add_row("folder", str(summary.path))
    table.add_row("type", summary.head_type)
    table.add_row("scores", summary.outputs)
    table.add_row("parameters", f"{summary.num_parameters:,}")
    table.add_row("size", f"{summary.num_bytes / 1e6:.1f} MB")
    for name, value in asdict(summary.config).items():
        table.add_row(name, str(value))
    console = output()
    console.print(table)
    console.print("\nprovenance:")
    console.print_json(data=summary.provenance)
