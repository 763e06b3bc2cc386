from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.training.prompts import (
    TrainingPrompt,
    is_held_out,
    prompt_from_row,
    read_exclusions,
    read_prompts,
    select_prompts,
)


def texts(prompts: tuple[TrainingPrompt, ...]) -> list[str]:
    return [prompt.messages[-1]["content"] for prompt in prompts]


def many(count: int, source: str = "a") -> list[TrainingPrompt]:
    return [TrainingPrompt.from_text(f"question {i} of {source}", source) for i in range(count)]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"question": " Why? "}, "Why?"),
        ({"instruction": "Sort.", "input": "3 1 2"}, "Sort.\n\n3 1 2"),
        ({"instruction": "Sort.", "instances": [{"input": "b a", "output": "a b"}]}, "Sort.\n\nb a"),
        ({"prompt": "Go"}, "Go"),
        ({"turns": ["One", "Two"]}, "One"),
        ({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]}, "Hi"),
    ],
)
def test_reads_every_known_field(row: dict[str, object], expected: str) -> None:
    assert prompt_from_row(row, "s", "row 1").messages[-1]["content"] == expected


@pytest.mark.parametrize("row", [{"answer": "x"}, {"question": "  "}, {"turns": []}, ["x"], "x"])
def test_row_without_prompt_is_named(row: object) -> None:
    with pytest.raises(ConfigError, match=r"file\.jsonl line 7 has no prompt"):
        prompt_from_row(row, "s", "file.jsonl line 7")


def test_history_ends_at_the_last_user_turn() -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "B"},
        {"role": "user", "content": "C"},
        {"role": "assistant", "content": "D"},
    ]
    prompt = prompt_from_row({"messages": turns}, "s", "row")
    assert [m["content"] for m in prompt.messages] == ["Be brief.", "A", "B", "C"]


def test_line_separators_inside_a_text_do_not_end_the_line(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(
        json.dumps({"question": "a\u2028b\x85c"}, ensure_ascii=False) + "\r\n", encoding="utf-8"
    )
    assert texts(tuple(read_prompts([str(tmp_path / "p.jsonl")]))) == ["a\u2028b\x85c"]


def test_folder_is_read_in_order_of_names(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"question": name}) + "\n")
    assert texts(tuple(read_prompts([str(tmp_path)]))) == ["a", "b"]


def test_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"question": "a"}\n{"question": \n')
    with pytest.raises(ConfigError, match=r"p\.jsonl line 2 is not JSON"):
        list(read_prompts([str(tmp_path / "p.jsonl")]))


def test_missing_file_and_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no prompts at"):
        list(read_prompts([str(tmp_path / "missing.jsonl")]))
    with pytest.raises(ConfigError, match=r"no \.jsonl file"):
        list(read_prompts([str(tmp_path)]))


def test_duplicates_are_dropped_and_order_depends_on_the_seed_alone() -> None:
    prompts = many(30)
    first = select_prompts([*prompts, *prompts[:5]], seed=1)
    assert first.num_duplicates == 5
    assert first.prompts == select_prompts(reversed(prompts), seed=1).prompts
    assert first.prompts != select_prompts(prompts, seed=2).prompts
    assert sorted(texts(first.prompts)) == sorted(texts(tuple(prompts)))


def test_each_source_is_limited() -> None:
    chosen = select_prompts([*many(30, "a"), *many(4, "b")], seed=0, max_per_source=7)
    assert [p.source for p in chosen.prompts].count("a") == 7
    assert [p.source for p in chosen.prompts].count("b") == 4


def test_exclusion_ignores_case_and_spacing_and_sees_every_turn(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    path.write_text(json.dumps({"turns": ["First  ONE", "Second one"]}) + "\n")
    excluded = read_exclusions([str(path)])
    prompts = [
        TrainingPrompt.from_text("first one", "a"),
        TrainingPrompt.from_text("fine", "a", ("second\none",)),
        TrainingPrompt.from_text("also fine", "a"),
    ]
    chosen = select_prompts(prompts, seed=0, excluded=excluded)
    assert texts(chosen.prompts) == ["also fine"]
    assert chosen.num_excluded == 2


def test_held_out_side_is_stable_and_has_its_share() -> None:
    keys = [prompt.root_key for prompt in many(3000)]
    share = sum(is_held_out(key, 0.1) for key in keys) / len(keys)
    assert 0.07 < share < 0.13
    assert all(is_held_out(key, 0.2) for key in keys if is_held_out(key, 0.1))


def test_follow_up_keeps_the_side_of_its_conversation() -> None:
    first = TrainingPrompt.from_text("Hello", "a", ("Go on.", "More."))
    second = first.followed("An answer.")
    assert second is not None
    assert [m["role"] for m in second.messages] == ["user", "assistant", "user"]
    assert second.follow_ups == ("More.",)
    assert second.root_key == first.key != second.key
    third = second.followed("Another.")
    assert third is not None
    assert third.root_key == first.key
    assert third.followed("Enough.") is None
    assert first.followed("  ") is None


def test_prompt_survives_json() -> None:
    prompt = TrainingPrompt.from_text("Grüße\u2028", "a", ("Go on.",)).followed("x")
    assert prompt is not None
    assert TrainingPrompt.from_dict(json.loads(json.dumps(prompt.as_dict()))) == prompt
