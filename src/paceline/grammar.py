"""Which texts a request may be answered with: a JSON schema, a regular expression, a grammar, a choice.

A `Grammar` only describes; `engine/grammar.py` follows it through draft trees. Both rest on llguidance, an
optional package that is imported when the first grammar is made.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Any

from paceline.errors import MissingDependencyError, RequestError

MAX_GRAMMAR_CHARS = 1 << 17
"""Larger grammars are refused: a schema of this size already takes a tenth of a second to compile."""
MAX_JSON_WHITESPACE = 40
"""Most spaces and line breaks between two tokens of JSON, which a model could otherwise write for ever."""
_HINTS: Mapping[str, str] = MappingProxyType(
    {
        "json_schema": "use the keywords, formats and types of JSON Schema that llguidance knows",
        "regex": "use a regular expression without look-around and back-references",
        "lark": "give a Lark grammar with a rule named start",
        "choice": "give a list of non-empty strings",
    }
)


def grammar_library() -> Any:
    """The package llguidance; MissingDependencyError where it is not installed."""
    try:
        return import_module("llguidance")
    except ImportError as error:
        raise MissingDependencyError(
            "structured output needs the package llguidance, which is not installed: "
            'pip install "paceline[serve]"'
        ) from error


@dataclass(frozen=True, slots=True)
class Grammar:
    """The texts that an answer may be, checked as soon as it is made; use the class methods.

    An answer that stops at an end-of-sequence id is one of them; one that `max_new_tokens`, the context or a
    stop string cut short is the beginning of one.

    Attributes:
        kind: `json_schema`, `regex`, `lark` or `choice`.
        source: the grammar as llguidance reads it.

    Raises:
        RequestError: no such grammar can be followed; the message says why.
        MissingDependencyError: llguidance is not installed.
    """

    kind: str
    source: str = field(repr=False)

    def __post_init__(self) -> None:
        """Compile once, without a tokenizer, to find mistakes before anything is decoded."""
        if len(self.source) > MAX_GRAMMAR_CHARS:
            raise RequestError(
                f"the {self.kind} has {len(self.source)} characters: at most {MAX_GRAMMAR_CHARS} are served"
            )
        library = grammar_library()
        limits = library.LLParserLimits(verbose_errors=False)
        is_error, messages = library.LLMatcher.validate_grammar_with_warnings(self.source, limits=limits)
        if is_error:
            raise RequestError(
                f"the {self.kind} cannot be used: {short_reason(messages[0])}; {_HINTS[self.kind]}"
            )

    @classmethod
    def json_schema(cls, schema: Mapping[str, object]) -> Grammar:
        """JSON that a schema describes; keywords that cannot be enforced are errors."""
        given: object = schema
        if not isinstance(given, Mapping):
            raise RequestError(f"the json_schema is {reprlib.repr(given)}: it must be an object")
        try:
            text = json.dumps(dict(schema), ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"the json_schema is not JSON: {error}") from error
        if len(text) > MAX_GRAMMAR_CHARS:
            return cls("json_schema", text)  # which refuses it, before anything reads it
        whitespace = rf"[\x20\x0A\x0D\x09]{{1,{MAX_JSON_WHITESPACE}}}"
        try:
            source = grammar_library().LLMatcher.grammar_from_json_schema(
                text, defaults={"whitespace_pattern": whitespace}
            )
        except ValueError as error:
            raise RequestError(
                f"the json_schema cannot be used: {short_reason(str(error))}; {_HINTS['json_schema']}"
            ) from error
        return cls("json_schema", source)

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Texts that match a regular expression (of Rust's `regex`) from beginning to end."""
        _check_text("regex", pattern)
        return cls("regex", grammar_library().LLMatcher.grammar_from_regex(pattern))

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Texts of a context-free grammar in llguidance's dialect of Lark."""
        _check_text("lark", text)
        return cls("lark", text)

    @classmethod
    def choice(cls, texts: Seq[str]) -> Grammar:
        """One of several texts."""
        given: object = texts
        is_list = isinstance(given, Seq) and not isinstance(given, str)
        if not is_list or not texts or not all(isinstance(text, str) and text for text in texts):
            raise RequestError(f"the choice is {reprlib.repr(given)}: {_HINTS['choice']}")
        for text in texts:
            _check_text("choice", text)
        literals = (json.dumps(text, ensure_ascii=False) for text in texts)
        return cls("choice", "start: " + " | ".join(literals))


def short_reason(message: str) -> str:
    """The one line of a message of llguidance that says what is wrong."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["unknown reason"]
    chosen = next((line for line in lines if line.startswith("error: ")), lines[0])
    return chosen.removeprefix("error: ")[:300]


def _check_text(kind: str, text: object) -> None:
    """Raise RequestError unless `text` is a non-empty string that can be encoded."""
    if not isinstance(text, str) or not text:
        raise RequestError(f"the {kind} is {reprlib.repr(text)}: it must be a non-empty string")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the {kind} is not valid Unicode: {error.reason}") from error
