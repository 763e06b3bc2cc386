"""Every error that paceline raises on purpose.

A message says what is wrong, the value seen, and what would be right. The core raises; the command line
prints the message as one line and exits with status 2.
"""

from __future__ import annotations


class PacelineError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(PacelineError):
    """An option, a configuration key or a registered name is not valid."""


class IncompatibleModelError(PacelineError):
    """The model cannot be a target: its cache or attention cannot verify a draft tree."""


class UnsupportedFeatureError(PacelineError):
    """A feature, or a combination of features, is not offered."""


class CheckpointError(PacelineError):
    """A head, a phrase vocabulary or a model folder is damaged, incomplete or does not fit."""


class ShapeError(PacelineError):
    """A tensor or a draft tree does not have the shape its contract asks for."""


class MissingDependencyError(PacelineError):
    """An optional package is needed and not installed."""


class RequestError(PacelineError):
    """A generation request cannot be served: its prompt, its limits or its sampling parameters are wrong."""
