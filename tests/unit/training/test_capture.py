from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.errors import RequestError
from paceline.targets.huggingface import HuggingFaceTarget
from paceline.training.answering import chat_ids
from paceline.training.capture import capture_states, conversation, recapture
from paceline.training.shards import Answer

TEXTS = [torch.tensor([5, 6, 7, 8, 9, 10, 11]), torch.tensor([20, 21]), torch.tensor([30, 31, 32, 33])]


def test_states_are_the_models_own(target_of: Callable[..., HuggingFaceTarget]) -> None:
    target = target_of("llama")
    states = capture_states(target, TEXTS[:1], feature_layers=(0, 1), dtype=torch.float32)[0]
    with torch.no_grad():
        own = target.model.model(input_ids=TEXTS[0][None], output_hidden_states=True)
    torch.testing.assert_close(states[:, 0], own.last_hidden_state[0], rtol=1e-4, atol=1e-4)
    for place, layer in enumerate((0, 1), start=1):
        torch.testing.assert_close(states[:, place], own.hidden_states[layer][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk_len", [1, 3, 512])
def test_packed_texts_do_not_see_each_other(
    chunk_len: int, target_of: Callable[..., HuggingFaceTarget]
) -> None:
    """Fault 74: packing several texts changes nothing for any of them."""
    target = target_of("llama")
    together = capture_states(target, TEXTS, chunk_len=chunk_len, dtype=torch.float32)
    for text, packed in zip(TEXTS, together, strict=True):
        alone = capture_states(target, [text], dtype=torch.float32)[0]
        torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)


def test_nothing_stays_in_the_cache(target_of: Callable[..., HuggingFaceTarget]) -> None:
    target = target_of("llama")
    before = set(target._slots)  # other tests may keep theirs on this shared target
    capture_states(target, TEXTS)
    assert set(target._slots) == before


def test_text_as_long_as_the_context_fits(target_of: Callable[..., HuggingFaceTarget]) -> None:
    target = target_of("gpt2-short")
    text = torch.arange(target.context_len) % 90
    assert capture_states(target, [text])[0].shape[0] == target.context_len


def test_recaptured_answers_keep_their_rows(target_of: Callable[..., HuggingFaceTarget]) -> None:
    target = target_of("llama")
    answers = [
        Answer(f"{i}", f"{i}", "s", text[:2], text[2:], torch.zeros(len(text) - 2, 1, 32), True)
        for i, text in enumerate(TEXTS)
        if len(text) > 2
    ]
    again = list(recapture(target, answers, feature_layers=(1,), batch_size=2))
    assert [a.key for a in again] == ["0", "2"]
    for old, new in zip(answers, again, strict=True):
        assert new.states.shape == (len(old.output_ids), 2, 32)
        whole = capture_states(target, [torch.cat([old.prompt_ids, old.output_ids])], feature_layers=(1,))[0]
        torch.testing.assert_close(new.states, whole[: len(old.output_ids)], rtol=0.02, atol=0.02)


def test_mask_is_the_part_behind_the_prompt(tokenizer: Any) -> None:
    """Fault 67: found by prefix difference; a template without generation blocks cannot empty or fill it."""
    messages = [{"role": "user", "content": "the man"}]
    prompt_ids = chat_ids(tokenizer, messages)
    answer_ids = [*tokenizer("in the hat")["input_ids"], tokenizer.eos_token_id]
    found = conversation(prompt_ids, [*prompt_ids, *answer_ids])
    assert found.is_answer.tolist() == [False] * len(prompt_ids) + [True] * len(answer_ids)
    assert not found.is_empty
    assert conversation(prompt_ids, prompt_ids).is_empty


def test_rendered_conversation_begins_with_what_generation_saw(tokenizer: Any) -> None:
    """Fault 69: the template's rendering of a finished conversation continues prompt and generated ids."""
    messages = [{"role": "user", "content": "the man"}]
    prompt_ids = chat_ids(tokenizer, messages)
    answer_ids = tokenizer("in the hat")["input_ids"]
    rendered = tokenizer.apply_chat_template(
        [*messages, {"role": "assistant", "content": "in the hat"}], tokenize=True, return_dict=False
    )
    generated = [*prompt_ids, *answer_ids, tokenizer.eos_token_id]
    assert rendered[: len(generated)] == generated
    conversation(prompt_ids, rendered)


def test_text_that_does_not_continue_its_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="does not begin with its prompt"):
        conversation([1, 2, 3], [1, 2, 4, 5])
