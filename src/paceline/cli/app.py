"""The command tree."""

from __future__ import annotations

import typer

from paceline.cli.bench import bench
from paceline.cli.calibrate import calibrate
from paceline.cli.chat import chat
from paceline.cli.check import check
from paceline.cli.demo import demo
from paceline.cli.doctor import doctor
from paceline.cli.export import export
from paceline.cli.generate import generate
from paceline.cli.heads import heads
from paceline.cli.serve import serve
from paceline.cli.train import train_app
from paceline.cli.version import version


def build_app() -> typer.Typer:
    """All commands of `paceline`."""
    app = typer.Typer(
        name="paceline",
        help="Frozen language models answer sooner, with the same text.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for command in (generate, chat, serve, demo, bench, calibrate, check, heads, export, doctor, version):
        app.command()(command)
    app.add_typer(train_app, name="train")
    return app
