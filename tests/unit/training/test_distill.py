"""Answers are what decoding gives, and recorded states are the ones that produced them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.drafters.none import NoDrafter
from paceline.engine.speculate import SpeculativeEngine
from paceline.sampling import SamplingParameters
from paceline.sequence import Sequence
from paceline.targets.huggingface import HuggingFaceTarget
from paceline.testing import TINY_EOS, ReplayDrafter, greedy_oracle
from paceline.training.answering import chat_ids
from paceline.training.capture import capture_states, replaced
from paceline.training.distill import Distiller, RecordingDrafter, by_similar_length
from paceline.training.prompts import TrainingPrompt
from paceline.training.shards import (
    Answer,
    read_answers,
)

ALL = 10**9


@pytest.fixture
def distil(
    target_of: Callable[..., HuggingFaceTarget], tokenizer: Any, tmp_path: Path
) -> Callable[..., Distiller]:
    def make(drafter: Any = None, **changes: Any) -> Distiller:
        settings: dict[str, Any] = {
            "eos_token_ids": frozenset({TINY_EOS}),
            "folder": tmp_path / "answers",
            "parameters": SamplingParameters(max_new_tokens=12),
            "batch_size": 3,
        }
        return Distiller(target_of("llama"), tokenizer, drafter or NoDrafter(), **{**settings, **changes})

    return make


def prompts(count: int, follow_ups: tuple[str, ...] = ()) -> list[TrainingPrompt]:
    return [
        TrainingPrompt.from_text(f"the man {i} " + "in " * (i % 4), "s", follow_ups) for i in range(count)
    ]


def run(distiller: Distiller, chosen: list[TrainingPrompt], enough: int = ALL) -> list[Answer]:
    distiller.run(chosen, lambda tokens: tokens >= enough, lambda _: None)
    return list(read_answers(distiller.folder))


def test_answers_are_what_plain_decoding_gives(distil: Callable[..., Distiller], tokenizer: Any) -> None:
    distiller = distil()
    chosen = prompts(5)
    answers = {answer.key: answer for answer in run(distiller, chosen)}
    for prompt in chosen:
        answer = answers[prompt.key]
        ids = chat_ids(tokenizer, prompt.messages)
        oracle = greedy_oracle(distiller.target.model, ids, 12, eos_token_ids=[TINY_EOS])
        assert answer.prompt_ids.tolist() == ids
        assert answer.output_ids.tolist() == oracle
        assert answer.is_complete == (oracle[-1] == TINY_EOS)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "granite", "cohere", "gpt2"])
def test_recorded_states_give_the_models_own_logits(
    architecture: str, target_of: Callable[..., HuggingFaceTarget]
) -> None:
    """Fault 65: the teacher is the state after the final norm, with the model's scale and soft-cap."""
    target = target_of(architecture)
    recorder = RecordingDrafter(NoDrafter(), dtype=torch.float32)
    sequence = Sequence(
        [5, 6, 7, 8], SamplingParameters(max_new_tokens=10), frozenset(), target.context_len, 0
    )
    engine = SpeculativeEngine(target, recorder, num_speculative_tokens=0)
    engine.submit(sequence)
    while engine.has_work:
        engine.round()
    states = recorder.take(sequence)[:, 0]
    with torch.no_grad():
        own = target.model(input_ids=torch.tensor([sequence.token_ids])).logits[0].softmax(-1)
        teacher = target.lm_head(states).softmax(-1)
    # Row j produced newest token j, which stands at position 3 + j.
    distance = 0.5 * (teacher - own[2 : 2 + len(states)]).abs().sum(-1)
    assert float(distance.max()) < 1e-4
    assert teacher.argmax(-1)[1:].tolist() == sequence.output_ids[:-1]


@pytest.mark.parametrize("layers", [(), (0, 1)])
@pytest.mark.parametrize("chunk", [2, 3, 512])
def test_recorded_states_equal_teacher_forced_ones(
    layers: tuple[int, ...], chunk: int, target_of: Callable[..., HuggingFaceTarget]
) -> None:
    target = target_of("llama")
    prompt_ids = [5, 6, 7, 8, 9]
    text = greedy_oracle(target.model, prompt_ids, 14)
    drafter = ReplayDrafter({tuple(prompt_ids): text}, 4, wrong=2, decoys=True)
    recorder = RecordingDrafter(drafter, layers, dtype=torch.float32)
    sequence = Sequence(prompt_ids, SamplingParameters(max_new_tokens=14), frozenset(), target.context_len, 0)
    engine = SpeculativeEngine(target, recorder, num_speculative_tokens=16, prefill_chunk=chunk)
    engine.submit(sequence)
    while engine.has_work:
        engine.round()
    recorded = recorder.take(sequence)
    ids = torch.tensor([*prompt_ids, *text[:-1]])
    captured = capture_states(target, [ids], feature_layers=layers, chunk_len=4, dtype=torch.float32)[0]
    answer = Answer("k", "k", "s", torch.tensor(prompt_ids), torch.tensor(text), recorded, False)
    torch.testing.assert_close(recorded, replaced(answer, captured).states, rtol=1e-4, atol=1e-4)
    assert recorded.shape == (14, 1 + len(layers), target.hidden_size)


def test_prompt_of_one_token_has_no_first_state(target_of: Callable[..., HuggingFaceTarget]) -> None:
    target = target_of("llama")
    recorder = RecordingDrafter(NoDrafter())
    sequence = Sequence([7], SamplingParameters(max_new_tokens=4), frozenset(), target.context_len, 0)
    engine = SpeculativeEngine(target, recorder, num_speculative_tokens=0)
    engine.submit(sequence)
    while engine.has_work:
        engine.round()
    states = recorder.take(sequence)
    assert states.shape[0] == 4
    assert not states[0].any()
    assert states[1].any()


def test_stops_at_enough_tokens_and_finishes_what_is_under_way(distil: Callable[..., Distiller]) -> None:
    answers = run(distil(), prompts(30), enough=60)
    total = sum(len(answer.output_ids) for answer in answers)
    assert 60 <= total < 60 + 3 * 12
    lengths = {len(answer.output_ids) for answer in answers if not answer.is_complete}
    assert lengths <= {12}


def test_goes_on_where_it_stopped(distil: Callable[..., Distiller]) -> None:
    chosen = prompts(12)
    first = {answer.key for answer in run(distil(), chosen, enough=50)}
    seen: list[int] = []
    distiller = distil()
    distiller.run(chosen, lambda tokens: tokens >= ALL, seen.append)
    answers = list(read_answers(distiller.folder))
    assert first < {answer.key for answer in answers}
    assert sorted(answer.key for answer in answers) == sorted(prompt.key for prompt in chosen)
    assert seen[0] >= 50
    assert seen[-1] == sum(len(answer.output_ids) for answer in answers)


def test_interrupt_writes_what_is_finished(
    distil: Callable[..., Distiller], monkeypatch: pytest.MonkeyPatch
) -> None:
    distiller = distil()
    rounds = 0
    original = distiller.engine.round

    def interrupted() -> Any:
        nonlocal rounds
        rounds += 1
        if rounds == 30:
            raise KeyboardInterrupt
        return original()

    monkeypatch.setattr(distiller.engine, "round", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(distiller, prompts(30))
    assert 0 < len(list(read_answers(distiller.folder))) < 30


def test_follow_ups_are_asked_after_the_answer_even_in_a_later_run(
    distil: Callable[..., Distiller], tokenizer: Any
) -> None:
    chosen = prompts(2, ("why is that?",))
    together = {answer.key: answer for answer in run(distil(), chosen)}
    assert len(together) == 4
    for prompt in chosen:
        text = tokenizer.decode(together[prompt.key].output_ids.tolist(), skip_special_tokens=True).strip()
        following = prompt.followed(text)
        assert following is not None
        assert together[following.key].root_key == prompt.key
        assert together[following.key].prompt_ids.tolist() == chat_ids(tokenizer, following.messages)


def test_follow_up_of_an_earlier_run_is_found_again(distil: Callable[..., Distiller], tmp_path: Path) -> None:
    chosen = prompts(2, ("why is that?",))
    first = distil(folder=tmp_path / "a", batch_size=1)
    first.run(chosen, lambda tokens: tokens >= 1, lambda _: None)
    assert len(list(read_answers(tmp_path / "a"))) == 1
    answers = run(distil(folder=tmp_path / "a"), chosen)
    whole = run(distil(folder=tmp_path / "b"), chosen)
    assert {a.key: a.output_ids.tolist() for a in answers} == {a.key: a.output_ids.tolist() for a in whole}


def test_prompt_longer_than_the_context_is_left_out(distil: Callable[..., Distiller]) -> None:
    long = TrainingPrompt.from_text("a very long question " * 60, "s")
    distiller = distil()
    answers = run(distiller, [long, *prompts(1)])
    assert [answer.key for answer in answers] == [prompts(1)[0].key]
    assert distiller.num_too_long == 1


def test_sampled_answers_depend_on_seed_and_prompt_alone(
    distil: Callable[..., Distiller], tmp_path: Path
) -> None:
    def sampled(name: str, seed: int, batch_size: int) -> dict[str, list[int]]:
        distiller = distil(
            folder=tmp_path / name,
            parameters=SamplingParameters(max_new_tokens=8, temperature=1.5),
            seed=seed,
            batch_size=batch_size,
        )
        return {answer.key: answer.output_ids.tolist() for answer in run(distiller, prompts(4))}

    assert sampled("a", 1, 1) == sampled("b", 1, 4)
    assert sampled("c", 2, 4) != sampled("b", 1, 4)


def test_similar_lengths_are_neighbours_and_nothing_is_lost() -> None:
    chosen = prompts(20)
    ordered = by_similar_length(chosen, window=20)
    assert sorted(p.key for p in ordered) == sorted(p.key for p in chosen)
    lengths = [len(p.messages[0]["content"]) for p in ordered]
    assert lengths == sorted(lengths)
