"""Reading prompt suites and choosing prompts."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from paceline.bench.suites import BUILTIN_SUITES, load_suite, spaced_indices
from paceline.errors import ConfigError


def write(folder, name, *items):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items), "utf-8")


@pytest.mark.parametrize(
    ("num_items", "limit", "expected"),
    [
        (10, 3, [0, 3, 6]),
        (10, 10, list(range(10))),
        (3, 7, [0, 1, 2]),
        (5, None, [0, 1, 2, 3, 4]),
        (9, 1, [0]),
    ],
)
def test_prompts_are_spaced_evenly(num_items, limit, expected):
    assert spaced_indices(num_items, limit) == expected


def test_spacing_reaches_the_last_part_of_the_file():
    chosen = spaced_indices(1319, 40)
    assert len(set(chosen)) == 40
    assert {b - a for a, b in pairwise(chosen)} <= {32, 33}
    assert chosen[-1] >= 1319 - 34


def test_builtin_suites_need_no_data():
    builtin, check, rare = (load_suite(name) for name in BUILTIN_SUITES)
    assert len(builtin.prompts) == 24
    assert {prompt.category for prompt in builtin.prompts} == {"maths", "chat", "code", "writing"}
    assert sum(len(prompt.turns) == 2 for prompt in builtin.prompts) >= 4
    assert len(check.prompts) == 100
    assert all(len(prompt.turns) == 1 for prompt in check.prompts)
    assert len(rare.prompts) == len({prompt.turns for prompt in rare.prompts}) == 40
    assert {prompt.category for prompt in rare.prompts} == {"language", "rare tokens"}


@pytest.mark.parametrize(
    ("item", "turns"),
    [
        ({"turns": ["a", "b"]}, ("a", "b")),
        ({"prompt": "a"}, ("a",)),
        ({"question": "a", "answer": "b"}, ("a",)),
        ({"instruction": "a", "instances": []}, ("a",)),
    ],
)
def test_messages_are_found_under_any_usual_name(tmp_path, item, turns):
    write(tmp_path, "own", item)
    assert load_suite("own", tmp_path).prompts[0].turns == turns


def test_ids_come_from_the_file_or_from_the_line(tmp_path):
    write(
        tmp_path,
        "own",
        {"question_id": 81, "prompt": "a"},
        {"prompt": "b"},
        {"task_id": "T/3", "prompt": "c"},
    )
    assert [prompt.prompt_id for prompt in load_suite("own", tmp_path).prompts] == ["81", "2", "T/3"]


def test_repeated_ids_are_told_apart(tmp_path):
    write(tmp_path, "own", {"question_id": 0, "prompt": "a"}, {"question_id": 0, "prompt": "b"})
    ids = [prompt.prompt_id for prompt in load_suite("own", tmp_path).prompts]
    assert len(set(ids)) == 2


def test_unicode_line_breaks_do_not_end_a_prompt(tmp_path):
    (tmp_path / "own.jsonl").write_text('{"prompt": "a\u2028b"}\n', "utf-8")
    assert load_suite("own", tmp_path).prompts[0].turns == ("a\u2028b",)


@pytest.mark.parametrize(
    "line",
    [
        '{"turns": []}',
        '{"turns": [1]}',
        '{"turns": "a"}',
        '{"text": "a"}',
        '["a"]',
        "no json",
        '{"turns": [""]}',
    ],
)
def test_a_line_without_messages_names_its_number(tmp_path, line):
    (tmp_path / "own.jsonl").write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        load_suite("own", tmp_path)


def test_an_unknown_suite_names_the_nearest_file(tmp_path):
    write(tmp_path, "gsm8k", {"prompt": "a"})
    with pytest.raises(ConfigError, match="'gsm8k'"):
        load_suite("gsm8", tmp_path)


def test_a_public_suite_without_a_folder_asks_for_it():
    with pytest.raises(ConfigError, match="--data"):
        load_suite("gsm8k")


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "own.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="no prompts"):
        load_suite("own", tmp_path)


def test_a_limit_below_one_is_refused():
    with pytest.raises(ConfigError, match="limit is 0"):
        load_suite("builtin", limit=0)


def test_the_digest_follows_the_prompts_chosen():
    assert load_suite("builtin", limit=3).digest == load_suite("builtin", limit=3).digest
    assert load_suite("builtin", limit=3).digest != load_suite("builtin", limit=4).digest
