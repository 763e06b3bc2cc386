"""Exit codes and error lines of the entry point."""

from __future__ import annotations

import errno
import os

import pytest
import typer

import paceline
from paceline import cli
from paceline.cli import app as app_module
from paceline.errors import ConfigError


def run_with(monkeypatch, command, *words):
    """Exit code of `main` when the app has this one command."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command)
    monkeypatch.setattr(app_module, "build_app", lambda: app)
    with pytest.raises(SystemExit) as stopped:
        cli.main(list(words))
    return stopped.value.code


def test_an_error_of_ours_is_one_line_and_exit_2(monkeypatch, capsys):
    def fail():
        raise ConfigError("the value is 3:\nit must be 4")

    assert run_with(monkeypatch, fail) == 2
    assert capsys.readouterr() == ("", "error: the value is 3: it must be 4\n")


def test_an_interrupt_is_exit_130_without_a_traceback(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    assert run_with(monkeypatch, interrupted) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("place", [None, "/somewhere/file"])
def test_a_full_disk_is_one_line_and_exit_2(place, monkeypatch, capsys):
    def write():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), place)

    assert run_with(monkeypatch, write) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: the disk is full")
    assert "PACELINE_CACHE_DIR" in line
    assert (place is None) == ("/somewhere/file" not in line)


def test_an_error_of_the_system_that_nobody_expected_keeps_its_traceback(monkeypatch):
    def read():
        raise OSError(errno.EIO, "broken")

    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(read)
    monkeypatch.setattr(app_module, "build_app", lambda: app)
    with pytest.raises(OSError, match="broken"):
        cli.main([])


def test_other_errors_keep_their_traceback(monkeypatch):
    def broken():
        raise ZeroDivisionError

    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(broken)
    monkeypatch.setattr(app_module, "build_app", lambda: app)
    with pytest.raises(ZeroDivisionError):
        cli.main([])


def test_success_is_exit_0(monkeypatch, capsys):
    assert run_with(monkeypatch, lambda: print("fine")) == 0
    assert capsys.readouterr().out == "fine\n"


def test_an_unknown_command_is_exit_2_and_names_the_nearest(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["generat"])
    assert stopped.value.code == 2
    assert "generate" in capsys.readouterr().err


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.strip() == paceline.__version__


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    listed = capsys.readouterr().out
    for command in (
        "generate",
        "chat",
        "bench",
        "calibrate",
        "demo",
        "check",
        "heads",
        "export",
        "doctor",
        "train",
        "version",
    ):
        assert f" {command} " in listed
