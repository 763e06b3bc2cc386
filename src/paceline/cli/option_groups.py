"""Options that several commands share, written once as dataclasses.

A command takes a group as one parameter; `expand_options` shows its fields to typer as options of the
command and hands them over as an instance.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace every parameter of `command` that is a dataclass by that class's fields.

    Raises:
        TypeError: two parameters would become options of the same name.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if isinstance(kind, type) and is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name in groups:
            parameters += _field_parameters(groups[parameter.name])
        else:
            parameters.append(parameter.replace(annotation=hints[parameter.name]))
    # Positional arguments first, then options by keyword; typer passes everything by keyword.
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    names = [p.name for p in parameters]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise TypeError(f"{command.__name__}: options {repeated} are declared twice")

    @wraps(command)
    def expanded(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {p.name: p.annotation for p in parameters}
    # typer would otherwise follow the wrapped function back to the unexpanded signature.
    del expanded.__wrapped__
    return expanded


def _field_parameters(group: type) -> list[inspect.Parameter]:
    """The fields of a dataclass as keyword parameters."""
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]
