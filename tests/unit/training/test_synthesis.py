from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import RequestError
from paceline.targets.huggingface import HuggingFaceTarget
from paceline.testing import TINY_EOS
from paceline.training.answering import user_turn_prefix
from paceline.training.openings import FOLLOW_UPS, OPENINGS
from paceline.training.synthesis import Synthesiser, is_good_prompt, read_synthesised, synthesise_into


@pytest.fixture
def synthesiser(target_of: Callable[..., HuggingFaceTarget], tokenizer: Any) -> Synthesiser:
    return Synthesiser(
        target_of("llama"),
        tokenizer,
        eos_token_ids=frozenset({TINY_EOS}),
        seed=3,
        temperature=2.0,
        max_new_tokens=24,
        batch_size=4,
    )


def test_prefix_is_the_template_up_to_the_users_text(tokenizer: Any) -> None:
    assert user_turn_prefix(tokenizer) == "<s>user\n"


def test_target_without_template_is_refused(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(RequestError, match="--data"):
        user_turn_prefix(tokenizer)


def test_template_that_changes_the_text_is_refused(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[0]['content'] | upper }}")
    with pytest.raises(RequestError, match="--data"):
        user_turn_prefix(tokenizer)


def test_prompt_depends_on_its_number_alone(synthesiser: Synthesiser) -> None:
    together = dict(synthesiser.run(iter(range(6))))
    alone = dict(synthesiser.run(iter([4])))
    assert together[4] == alone[4]
    assert sorted(together) == list(range(6))


def test_interrupted_file_goes_on_behind_its_cut_line(synthesiser: Synthesiser, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    synthesise_into(whole / "prompts-0.jsonl", synthesiser, range(5))
    cut = tmp_path / "cut"
    cut.mkdir()
    lines = (whole / "prompts-0.jsonl").read_text().strip().split("\n")
    (cut / "prompts-0.jsonl").write_text("\n".join(lines[:2]) + "\n" + lines[2][:9])
    done: list[int] = []
    synthesise_into(cut / "prompts-0.jsonl", synthesiser, range(5), done.append)
    assert read_synthesised(cut) == read_synthesised(whole)
    assert done == [3, 4, 5]


def test_dropped_prompts_are_remembered(synthesiser: Synthesiser, tmp_path: Path) -> None:
    synthesise_into(tmp_path / "prompts-0.jsonl", synthesiser, range(8))
    rows = [json.loads(line) for line in (tmp_path / "prompts-0.jsonl").read_text().split("\n") if line]
    assert sorted(row["number"] for row in rows) == list(range(8))


@pytest.mark.parametrize(
    "text",
    [
        "Too short",
        "word " * 200,
        "go go go go go",
        "the cat sat on " * 5,
        "What is the \ufffd of this?",
    ],
)
def test_bad_prompts_are_dropped(text: str) -> None:
    assert not is_good_prompt(text)


def test_good_prompt_is_kept() -> None:
    assert is_good_prompt("Write a short story about a lighthouse keeper who finds a letter.")


def test_openings_are_distinct_and_every_kind_has_some() -> None:
    everything = [opening for openings in OPENINGS.values() for opening in openings]
    assert len(OPENINGS) >= 8
    assert len(set(everything)) == len(everything)
    assert len(set(FOLLOW_UPS)) == len(FOLLOW_UPS)
