"""Groups of options expanded into a command's signature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli.option_groups import expand_options


@dataclass(frozen=True, slots=True)
class Paint:
    """Options of a test command."""

    colour: Annotated[str, typer.Option(help="Which colour.")] = "red"
    coats: Annotated[int | None, typer.Option()] = None


@dataclass(frozen=True, slots=True)
class Clash:
    """Has an option of the same name."""

    colour: Annotated[str, typer.Option()] = "blue"


def run(command, *words):
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(words))


def test_a_group_arrives_as_one_object_built_from_its_options():
    seen = []

    @expand_options
    def paint(
        what: Annotated[str, typer.Argument()],
        paint: Paint,
        dry: Annotated[bool, typer.Option("--dry")] = False,
    ) -> None:
        """Paint something."""
        seen.append((what, paint, dry))

    assert run(paint, "wall", "--coats", "2").exit_code == 0
    assert run(paint, "--dry", "--colour", "green", "door").exit_code == 0
    assert seen == [("wall", Paint("red", 2), False), ("door", Paint("green", None), True)]


def test_help_shows_the_options_of_a_group():
    @expand_options
    def paint(paint: Paint) -> None:
        """Paint something."""

    output = run(paint, "--help").output
    assert "--colour" in output
    assert "Which colour." in output


def test_options_declared_twice_are_refused():
    def paint(paint: Paint, clash: Clash) -> None:
        """Paint something."""

    with pytest.raises(TypeError, match="colour"):
        expand_options(paint)
