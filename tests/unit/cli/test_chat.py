"""A conversation in the terminal."""

from __future__ import annotations

import pytest

from paceline.cli.chat import ChatSession
from paceline.drafters.none import NoDrafter
from paceline.drafters.prompt_lookup import PromptLookupDrafter
from paceline.drafters.switching import SwitchingDrafter
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


@pytest.fixture
def choosing(generator_of):
    parts = {"prompt_lookup": PromptLookupDrafter(), "none": NoDrafter()}
    generator = generator_of(drafter=SwitchingDrafter(parts, "prompt_lookup"))
    return ChatSession(Conversation(generator, SamplingParameters(max_new_tokens=6)))


def test_the_drafter_of_the_next_answers_can_be_chosen(choosing, capsys):
    choosing.handle("/drafter")
    assert "drafter: prompt_lookup; loaded: prompt_lookup, none" in capsys.readouterr().err
    choosing.handle("/drafter none")
    choosing.handle("a a a a a a a a")
    choosing.handle("/stats")
    assert "6 rounds" in capsys.readouterr().err
    choosing.handle("/drafter fhrase")
    assert "error: drafter 'fhrase' is not loaded" in capsys.readouterr().err
    assert choosing.conversation.drafter == "none"


def test_a_budget_makes_the_next_answers_lossy_until_it_is_off(choosing, capsys):
    choosing.handle("/budget")
    assert "budget: off" in capsys.readouterr().err
    choosing.handle("/budget 3.5")
    assert choosing.conversation.verifier == "budgeted"
    assert choosing.conversation.parameters.relaxation.risk_budget == 3.5
    assert "3.5 logits" in capsys.readouterr().err
    choosing.handle("/budget discovery")
    assert choosing.conversation.parameters.relaxation.risk_budget == 12
    choosing.handle("hello")
    assert len(choosing.conversation.messages) == 2
    choosing.handle("/budget off")
    assert choosing.conversation.verifier is None
    choosing.handle("/budget stabel")
    assert "did you mean 'stable'" in capsys.readouterr().err
    choosing.handle("/budget -1")
    assert "risk_budget is -1.0" in capsys.readouterr().err


def test_a_sampled_conversation_has_no_budget(generator_of, capsys):
    session = ChatSession(Conversation(generator_of(), SamplingParameters(max_new_tokens=6, temperature=1.0)))
    session.handle("/budget 3")
    assert "budgeted verification needs temperature 0" in capsys.readouterr().err
    assert session.conversation.verifier is None


def test_history_shows_what_was_said(session, capsys):
    session.handle("hello")
    capsys.readouterr()
    session.handle("/history")
    assert capsys.readouterr().err.startswith("user: hello\nassistant: ")
