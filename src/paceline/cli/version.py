"""`paceline version`."""

from __future__ import annotations

from paceline import __version__


def version() -> None:
    """Print the version."""
    print(__version__)
