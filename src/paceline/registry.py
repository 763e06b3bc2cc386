"""Plug points by name: built-in values as dotted paths, others through entry points.

A package adds a drafter or a verifier by declaring an entry point in the group `paceline.drafters` or
`paceline.verifiers`; nothing is imported before it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any

from paceline.config import check_known
from paceline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NamedDrafter:
    """A drafter as a benchmark names it.

    Attributes:
        name: registered.
        head: folder of a head of its own, if one is named.
    """

    name: str
    head: Path | None


DRAFTERS: Mapping[str, str] = MappingProxyType(
    {
        "none": "paceline.drafters.none:NoDrafter",
        "prompt_lookup": "paceline.drafters.prompt_lookup:PromptLookupDrafter",
        "phrase": "paceline.drafters.phrase:PhraseDrafter",
        "eagle3:full": "paceline.drafters.eagle:EagleDrafter",
        "eagle3:static": "paceline.drafters.eagle:StaticEagleDrafter",
        "eagle3:speculative": "paceline.drafters.eagle:SpeculativeEagleDrafter",
        "phrase+prompt_lookup": "paceline.drafters.mixed:MixedDrafter",
    }
)
VERIFIERS: Mapping[str, str] = MappingProxyType(
    {
        "greedy": "paceline.verifiers.greedy:GreedyVerifier",
        "sampling": "paceline.verifiers.sampling:SamplingVerifier",
        "budgeted": "paceline.verifiers.budgeted:BudgetedVerifier",
        "typical": "paceline.verifiers.typical:TypicalVerifier",
        "margin": "paceline.verifiers.margin:MarginVerifier",
    }
)


def drafter_names() -> list[str]:
    """Names of all drafters that can be asked for, sorted."""
    return sorted(_paths("paceline.drafters", DRAFTERS))


def verifier_names() -> list[str]:
    """Names of all verifiers that can be asked for, sorted."""
    return sorted(_paths("paceline.verifiers", VERIFIERS))


def drafter_class(name: str) -> Any:
    """The drafter class registered as `name`; ConfigError names the nearest known one."""
    return _resolve("drafter", name, _paths("paceline.drafters", DRAFTERS))


def split_drafter(text: str) -> NamedDrafter:
    """Read `NAME` or `NAME:FOLDER`, where a name may hold a colon itself; ConfigError for unknown names."""
    known = _paths("paceline.drafters", DRAFTERS)
    for name in sorted(known, key=len, reverse=True):
        if text == name or text.startswith(f"{name}:"):
            folder = text[len(name) + 1 :]
            return NamedDrafter(name, Path(folder) if folder else None)
    check_known("drafter", text.partition(":")[0], known)
    return NamedDrafter(text, None)


def verifier_class(name: str) -> Any:
    """The verifier class registered as `name`; ConfigError names the nearest known one."""
    return _resolve("verifier", name, _paths("paceline.verifiers", VERIFIERS))


def _paths(group: str, builtin: Mapping[str, str]) -> dict[str, str]:
    """Dotted path of every name of a group; built-in names cannot be replaced from outside."""
    return {entry.name: entry.value for entry in entry_points(group=group)} | dict(builtin)


def _resolve(kind: str, name: str, paths: Mapping[str, str]) -> Any:
    check_known(kind, name, paths)
    module_name, _, attribute = paths[name].partition(":")
    found = getattr(import_module(module_name), attribute, None)
    if not isinstance(found, type):
        raise ConfigError(f"{kind} {name!r} points to {paths[name]!r}, which is not a class")
    return found
