"""paceline: frozen language models answer sooner, with the same text.

The names below are the public interface; heavy imports (torch, transformers) happen when one of them is first
used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.engine.generator import GenerationResult, Generator, StreamEvent
    from paceline.engine.load import load
    from paceline.engine.stats import GenerationStatistics
    from paceline.errors import (
        CheckpointError,
        ConfigError,
        IncompatibleModelError,
        MissingDependencyError,
        PacelineError,
        RequestError,
        ShapeError,
        UnsupportedFeatureError,
    )
    from paceline.grammar import Grammar
    from paceline.integrations.transformers import custom_generate
    from paceline.relaxation import Relaxation
    from paceline.sampling import SamplingParameters
    from paceline.sequence import TokenLogProb
    from paceline.tree import DraftTree

__version__ = "0.1.0"

_HOMES = {
    "CheckpointError": "paceline.errors",
    "ConfigError": "paceline.errors",
    "DraftTree": "paceline.tree",
    "GenerationResult": "paceline.engine.generator",
    "GenerationStatistics": "paceline.engine.stats",
    "Generator": "paceline.engine.generator",
    "Grammar": "paceline.grammar",
    "IncompatibleModelError": "paceline.errors",
    "MissingDependencyError": "paceline.errors",
    "PacelineError": "paceline.errors",
    "Relaxation": "paceline.relaxation",
    "RequestError": "paceline.errors",
    "SamplingParameters": "paceline.sampling",
    "ShapeError": "paceline.errors",
    "StreamEvent": "paceline.engine.generator",
    "TokenLogProb": "paceline.sequence",
    "UnsupportedFeatureError": "paceline.errors",
    "custom_generate": "paceline.integrations.transformers",
    "load": "paceline.engine.load",
}

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DraftTree",
    "GenerationResult",
    "GenerationStatistics",
    "Generator",
    "Grammar",
    "IncompatibleModelError",
    "MissingDependencyError",
    "PacelineError",
    "Relaxation",
    "RequestError",
    "SamplingParameters",
    "ShapeError",
    "StreamEvent",
    "TokenLogProb",
    "UnsupportedFeatureError",
    "custom_generate",
    "load",
]


def __getattr__(name: str) -> Any:
    """Import the module behind a public name on first use."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted([*__all__, "__version__"])
