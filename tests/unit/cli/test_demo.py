"""Colours and figures of the demo."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from rich.console import Console

from bench_fakes import statistics
from paceline.cli.demo import (
    DRAFTED_STYLE,
    DemoPair,
    coloured,
    explain_differences,
    result_table,
    stream_answer,
)
from paceline.engine.generator import GenerationResult, StreamEvent
from paceline.sampling import SamplingParameters
from paceline.testing import ReplayDrafter


def event(tokenizer, text, origins, shown=None):
    ids = tokenizer(text)["input_ids"]
    return StreamEvent(text if shown is None else shown, tuple(ids), tuple(origins), 4, None, None)


def marked(text):
    """The parts of a rich text that are marked as drafted."""
    return [text.plain[span.start : span.end] for span in text.spans if span.style == DRAFTED_STYLE]


def test_accepted_drafts_are_marked_token_by_token(tokenizer):
    text = coloured(event(tokenizer, "bcd", ["drafted", "drafted", "target"]), tokenizer)
    assert text.plain == "bcd"
    assert marked(text) == ["b", "c"]


def test_text_that_does_not_match_its_tokens_is_marked_as_a_whole(tokenizer):
    text = coloured(event(tokenizer, "bcd", ["drafted", "target", "target"], shown="é"), tokenizer)
    assert (text.plain, text.style) == ("é", DRAFTED_STYLE)
    text = coloured(event(tokenizer, "bcd", ["target"] * 3, shown="é"), tokenizer)
    assert text.style == ""


def result(ids, seconds, **counts):
    measured = dataclasses.replace(
        statistics(tokens=len(ids), **counts), seconds=seconds, tokens_per_second=len(ids) / seconds
    )
    return GenerationResult(tuple(ids), "text", "length", None, 3, measured)


@pytest.fixture
def pairs():
    return [
        DemoPair(result([1, 2, 3, 4], 4.0, rounds=4), result([1, 2, 3, 4], 1.0, rounds=2)),
        DemoPair(result([1, 2, 3, 4], 4.0, rounds=4), result([1, 2, 9, 9], 3.0, rounds=4)),
    ]


def rendered(renderable):
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(renderable)
    return console.export_text()


def test_the_table_shows_speed_rounds_and_sameness(pairs):
    lines = [line for line in rendered(result_table(pairs)).splitlines() if "/s" in line]
    assert "4.00 x" in lines[0]
    assert "4 -> 2" in lines[0]
    assert "yes" in lines[0]
    assert " no " in lines[1]
    # 8 tokens in 8 s against 8 tokens in 4 s.
    assert "2.00 x" in lines[2]
    assert "1 of 2" in lines[2]


def explanation(pairs, target, noise, monkeypatch):
    from paceline.bench import near_ties

    monkeypatch.setattr(near_ties, "logit_gaps", lambda *_: (0.1, 0.125))
    monkeypatch.setattr(near_ties, "width_noise", lambda *_: noise)
    generator = SimpleNamespace(encode=lambda text: [5, 6], target=target)
    console = Console(width=400, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    explain_differences(console, pairs, generator, ["a", "b"][: len(pairs)])
    return console.export_text()


def test_a_near_tie_is_explained_with_its_gap(pairs, target_of, monkeypatch):
    text = explanation(pairs, target_of(), 0.25, monkeypatch)
    assert "Prompt 2: the answers part at token 3" in text
    assert "0.125 apart" in text
    assert "fault" not in text
    assert "Prompt 1" not in text


def test_a_difference_beyond_rounding_is_called_a_fault(pairs, target_of, monkeypatch):
    assert "fault" in explanation(pairs, target_of(), 0.05, monkeypatch)


def test_identical_answers_need_no_explanation(pairs, target_of, monkeypatch):
    assert explanation(pairs[:1], target_of(), 0.25, monkeypatch) == ""


def test_the_printed_stream_is_the_answer(generator_of):
    console = Console(width=400, record=True, file=open("/dev/null", "w"), soft_wrap=True)  # noqa: SIM115
    plain = generator_of().generate("hello", SamplingParameters(max_new_tokens=12))
    recorded = {tuple(generator_of().encode("hello")): plain.token_ids}
    drafting = generator_of(drafter=ReplayDrafter(recorded, 3))
    answer = stream_answer(console, drafting, "hello", 12)
    assert answer.token_ids == plain.token_ids
    text = console.export_text()
    assert text.startswith(plain.text)
    assert "tokens/s" in text[len(plain.text) :]
