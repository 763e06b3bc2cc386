"""Calls of tools, read from a text as it grows."""

from __future__ import annotations

import json

import pytest

from paceline.server.tool_calls import ToolCallReader, ToolFormat, forced_call

STYLE = ToolFormat("<tool_call>", "</tool_call>")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def read(text, size):
    reader = ToolCallReader(STYLE)
    pieces = [reader.push(text[i : i + size]) for i in range(0, len(text), size)] + [reader.finish()]
    return "".join(piece.text for piece in pieces), [call for piece in pieces for call in piece.calls]


@pytest.mark.parametrize("size", [1, 2, 5, 11, 500])
def test_text_stays_text_and_calls_become_calls_however_the_text_is_cut(size):
    shown, calls = read(f"Let me see. {CALL}{CALL} <tool_ca", size)
    assert shown == "Let me see.  <tool_ca"
    assert [call.name for call in calls] == ["weather", "weather"]
    assert json.loads(calls[0].arguments) == {"city": "Köln"}
    assert calls[0].id != calls[1].id


@pytest.mark.parametrize(
    "inside",
    [
        "no json",
        "[1, 2]",
        '{"arguments": {}}',
        '{"name": 3}',
        "[" * 100_000,
        '{"name": "f", "arguments": {"a": "\\ud83d"}}',
    ],
)
def test_what_is_no_call_is_text_with_its_marks(inside):
    text = f"a <tool_call>{inside}</tool_call> b"
    assert read(text, 7) == (text, [])


def test_a_call_whose_end_was_cut_off_counts_when_it_is_whole():
    cut = CALL.removesuffix("</tool_call>")
    assert [call.name for call in read(cut, 4)[1]] == ["weather"]
    assert read(cut[:-5], 4) == (cut[:-5], [])


class Templated:
    def __init__(self, template):
        self.chat_template = template


def test_a_model_without_a_place_for_tools_has_no_format():
    assert ToolFormat.of(Templated(None)) is None
    assert ToolFormat.of(Templated("{{ messages }}")) is None
    assert ToolFormat.of(Templated("{{ tools }} [TOOL_CALLS]")) is None
    assert ToolFormat.of(Templated("{{ tools }} <tool_call>")) == STYLE
    assert ToolFormat.of(Templated({"default": "", "tool_use": "{{ tools }} <tool_call>"})) == STYLE


def test_a_forced_call_is_a_grammar_of_the_functions():
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    assert forced_call(STYLE, {"weather": schema}).kind == "lark"
    assert forced_call(STYLE, {"weather": schema, "time": None}).kind == "lark"
