"""Turns that reuse the cache of the former turn."""

from __future__ import annotations

import pytest

from paceline.engine.conversation import Conversation
from paceline.errors import RequestError
from paceline.sampling import SamplingParameters
from paceline.testing import ReplayDrafter

PARAMETERS = SamplingParameters(max_new_tokens=12)
TURNS = ("hello there", "and then?", "why?")


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mistral-sliding", "gemma3"])
def test_turns_with_cache_reuse_equal_cold_runs(generator_of, architecture):
    generator, cold = generator_of(architecture), generator_of(architecture)
    conversation = Conversation(generator, PARAMETERS)
    for number, text in enumerate(TURNS):
        result = conversation.ask(text)
        assert result.token_ids == cold.chat(conversation.messages[:-1], PARAMETERS).token_ids
        assert (conversation.num_reused_tokens > 0) == (number > 0)


def test_reuse_reaches_to_where_the_new_prompt_leaves_the_old_one(generator_of):
    conversation = Conversation(generator_of(), PARAMETERS)
    first = conversation.ask(TURNS[0])
    before = [*conversation.generator.encode_chat(conversation.messages[:1]), *first.token_ids]
    conversation.ask(TURNS[1])
    now = conversation.generator.encode_chat(conversation.messages[:3])
    common = next((i for i, (old, new) in enumerate(zip(before, now)) if old != new), len(before))
    # The newest token of a finished answer is not in the cache.
    assert conversation.num_reused_tokens == min(common, len(before) - 1)


def test_drafts_of_a_former_turn_leave_nothing_behind(generator_of):
    plain = Conversation(generator_of(), PARAMETERS)
    expected = [plain.ask(text).token_ids for text in TURNS]
    recorded = {}
    messages = []
    for text, ids in zip(TURNS, expected, strict=True):
        messages.append({"role": "user", "content": text})
        recorded[tuple(plain.generator.encode_chat(messages))] = ids
        messages.append(plain.messages[len(messages)])
    drafting = Conversation(
        generator_of(drafter=ReplayDrafter(recorded, 5, wrong=3, decoys=True)), PARAMETERS
    )
    assert [drafting.ask(text).token_ids for text in TURNS] == expected


def test_the_system_message_comes_first_and_survives_a_reset(generator_of):
    conversation = Conversation(generator_of(), PARAMETERS, system="be brief")
    conversation.ask("hello")
    assert [m["role"] for m in conversation.messages] == ["system", "user", "assistant"]
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "be brief"}]


def test_streamed_text_is_what_the_conversation_remembers(generator_of):
    conversation = Conversation(generator_of(), PARAMETERS)
    text = "".join(event.text for event in conversation.stream("hello"))
    assert conversation.messages[-1] == {"role": "assistant", "content": text}


def test_an_answer_closed_early_keeps_what_was_said_and_frees_its_cache(generator_of):
    conversation = Conversation(generator_of(), PARAMETERS)
    events = conversation.stream("hello")
    said = next(events).text + next(events).text
    events.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": said}
    assert not conversation.generator.engine.has_work
    result = conversation.ask("go on")
    assert conversation.num_reused_tokens == 0
    assert result.token_ids == generator_of().chat(conversation.messages[:-1], PARAMETERS).token_ids


def test_an_interrupt_in_the_last_round_leaves_no_sequence_running(generator_of, monkeypatch):
    conversation = Conversation(generator_of(), PARAMETERS)
    engine = conversation.generator.engine

    def interrupted(sequence):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(engine, "_finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            conversation.ask("hello")
    assert not engine.has_work
    result = conversation.ask("go on")
    assert conversation.num_reused_tokens == 0
    assert result.token_ids == generator_of().chat(conversation.messages[:-1], PARAMETERS).token_ids


def test_a_turn_that_does_not_fit_is_refused_and_changes_nothing(generator_of):
    conversation = Conversation(generator_of(), PARAMETERS)
    conversation.ask("hello")
    before = list(conversation.messages)
    with pytest.raises(RequestError, match="context"):
        conversation.ask("x " * 300)
    assert conversation.messages == before
    conversation.ask("go on")
    assert conversation.num_reused_tokens > 0


def test_closing_frees_the_cache_and_a_later_turn_starts_cold(generator_of):
    conversation = Conversation(generator_of(), PARAMETERS)
    conversation.ask("hello")
    slots = dict(conversation.generator.target._slots)
    conversation.close()
    assert len(conversation.generator.target._slots) == len(slots) - 1
    conversation.ask("go on")
    assert conversation.num_reused_tokens == 0
