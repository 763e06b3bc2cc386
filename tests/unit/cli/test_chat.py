"""A conversation in the terminal."""

from __future__ import annotations

import pytest

from paceline.cli.chat import ChatSession
from paceline.engine.conversation import Conversation
from paceline.sampling import SamplingParameters


@pytest.fixture
def session(generator_of):
    return ChatSession(Conversation(generator_of(), SamplingParameters(max_new_tokens=6)))


def test_an_answer_is_printed_and_remembered(session, capsys):
    session.handle("hello")
    roles = [message["role"] for message in session.conversation.messages]
    assert roles == ["user", "assistant"]
    assert capsys.readouterr().out == session.conversation.messages[1]["content"] + "\n"


def test_stats_describe_the_newest_answer(session, capsys):
    session.handle("/stats")
    assert "no answer yet" in capsys.readouterr().err
    session.handle("hello")
    session.handle("/stats")
    assert "6 tokens in" in capsys.readouterr().err


def test_reset_forgets_the_conversation(session):
    session.handle("hello")
    session.handle("/reset")
    assert session.conversation.messages == []


@pytest.mark.parametrize("word", ["/exit", "/quit", " /exit "])
def test_exit_closes_the_session(session, word):
    session.handle(word)
    assert not session.is_open


def test_unknown_commands_are_not_sent_to_the_model(session, capsys):
    session.handle("/stat")
    assert session.conversation.messages == []
    assert "'/stat'" in capsys.readouterr().err


def test_an_empty_line_is_ignored(session):
    session.handle("   ")
    assert session.conversation.messages == []


def test_an_interrupt_stops_the_answer_and_the_session_goes_on(session, capsys, monkeypatch):
    real_round = session.conversation.generator.engine.round
    rounds = []

    def interrupted_round():
        rounds.append(1)
        if len(rounds) == 3:
            raise KeyboardInterrupt
        return real_round()

    monkeypatch.setattr(session.conversation.generator.engine, "round", interrupted_round)
    session.handle("hello")
    assert session.is_open
    assert "(stopped)" in capsys.readouterr().err
    assert not session.conversation.generator.engine.has_work
    session.handle("and then?")
    assert len(session.conversation.messages) == 4


def test_a_conversation_that_is_too_long_is_an_error_line_and_changes_nothing(session, capsys):
    session.handle("hello")
    before = list(session.conversation.messages)
    session.handle("x " * 300)
    assert capsys.readouterr().err.startswith("error: ")
    assert session.conversation.messages == before
    session.handle("go on")
    assert len(session.conversation.messages) == 4
