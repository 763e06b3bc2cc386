"""`paceline train`: train a draft head for a frozen target."""

from __future__ import annotations

import typer

from paceline.cli.train_eagle import eagle3
from paceline.cli.train_phrase import phrase

train_app = typer.Typer(
    help="Train a draft head for a frozen target.", no_args_is_help=True, add_completion=False
)
train_app.command()(phrase)
train_app.command()(eagle3)


@train_app.callback()
def train() -> None:
    """Train a draft head for a frozen target."""
