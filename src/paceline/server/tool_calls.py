"""Calls of tools: how a model writes them, read from its text as it grows.

Models that know tools write a call as JSON between two marks; which ones, their chat template shows. Known
are the marks of Hermes, Qwen and SmolLM (`<tool_call>`). Text in front of a call stays text.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.grammar import Grammar

_MARKS = (("<tool_call>", "</tool_call>"),)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Marks around a call.

    Attributes:
        begin: in front of it.
        end: behind it.
    """

    begin: str
    end: str

    @classmethod
    def of(cls, tokenizer: Any) -> ToolFormat | None:
        """The format of a model; None when its chat template takes no tools, or writes them another way."""
        template = getattr(tokenizer, "chat_template", None) or ""
        if isinstance(template, dict):
            template = template.get("tool_use") or template.get("default") or ""
        if "tools" not in template:
            return None
        return next((cls(*marks) for marks in _MARKS if marks[0] in template), None)


@dataclass(frozen=True, slots=True)
class Call:
    """A call that the model made.

    Attributes:
        id: made up here; the client names it in its answer.
        name: of the function.
        arguments: JSON, as a text.
    """

    id: str
    name: str
    arguments: str

    def as_dict(self, index: int | None = None) -> dict[str, Any]:
        """As OpenAI's clients expect it; streams number them."""
        found: dict[str, Any] = {} if index is None else {"index": index}
        return found | {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


@dataclass(frozen=True, slots=True)
class ToolPiece:
    """What new text turned out to be.

    Attributes:
        text: to be shown.
        calls: complete ones.
    """

    text: str
    calls: tuple[Call, ...]


class ToolCallReader:
    """Divides a growing text into text and calls.

    Args:
        style: marks around calls.
    """

    def __init__(self, style: ToolFormat) -> None:
        self._style = style
        self._held = ""
        self._is_inside = False

    def push(self, text: str) -> ToolPiece:
        """Add text; what may still become a mark or a call is held back."""
        self._held += text
        shown: list[str] = []
        calls: list[Call] = []
        while True:
            mark = self._style.end if self._is_inside else self._style.begin
            place = self._held.find(mark)
            if place < 0:
                break
            inside, self._held = self._held[:place], self._held[place + len(mark) :]
            if not self._is_inside:
                shown.append(inside)
            else:
                call = _read_call(inside)
                # What cannot be read is text, with its marks: it was said.
                calls += [] if call is None else [call]
                shown += [] if call is not None else [self._style.begin + inside + self._style.end]
            self._is_inside = not self._is_inside
        if not self._is_inside:
            num_free = len(self._held) - _overlap(self._held, self._style.begin)
            shown.append(self._held[:num_free])
            self._held = self._held[num_free:]
        return ToolPiece("".join(shown), tuple(calls))

    def finish(self) -> ToolPiece:
        """The rest: a call whose end mark was cut off, or text."""
        held, self._held = self._held, ""
        if not self._is_inside:
            return ToolPiece(held, ())
        call = _read_call(held)
        return ToolPiece(self._style.begin + held, ()) if call is None else ToolPiece("", (call,))


def forced_call(style: ToolFormat, functions: Mapping[str, Mapping[str, Any] | None]) -> Grammar:
    """The grammar of exactly one call of one of some functions.

    Raises:
        RequestError: the schema of a function's parameters cannot be followed.
    """
    choices = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": dict(schema or {"type": "object"})},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, schema in functions.items()
    ]
    schema = choices[0] if len(choices) == 1 else {"anyOf": choices}
    begin, end = json.dumps(style.begin + "\n"), json.dumps("\n" + style.end)
    return Grammar.lark(f"start: {begin} call {end}\ncall: %json {json.dumps(schema)}\n")


def _read_call(text: str) -> Call | None:
    """A call from its JSON; None when it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    as_text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    try:
        (as_text + found["name"]).encode()
    except UnicodeEncodeError:
        # Half a character, escaped: it could not be sent.
        return None
    return Call(f"call_{secrets.token_hex(12)}", found["name"], as_text)


def _overlap(text: str, mark: str) -> int:
    """Characters at the end of the text that the mark begins with."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)
