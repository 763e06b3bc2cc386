"""Whether an answer is right: numbers exactly, programs by their tests."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest

from paceline.bench.suites import BenchPrompt, Suite
from paceline.bench.tasks import build_graders, final_number, program_of
from paceline.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 18.", "18"),
        ("She has $1,234.50 left", "1234.50"),
        ("First 3, then \\boxed{42}. Check: 6 * 7 = 42, with 1 way.", "42"),
        ("\\boxed{x = 7}", "7"),
        ("\\boxed{seven}, that is 7", "7"),
        ("minus -5", "-5"),
        ("none at all", None),
        ("It is .5", "0.5"),
        ("18.00", "18"),
    ],
)
def test_the_number_that_an_answer_ends_in(text, number):
    assert final_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\ndef f(x):\n    return x\n```\nDone.", "def f(x):\n    return x\n"),
        ("```\nimport os\n```\nand\n```python\ndef f():\n    pass\n```", "def f():\n    pass\n"),
        ("```python\ndef f():\n    return 1\n", "def f():\n    return 1\n"),
        ("def f():\n    return 1", "def f():\n    return 1"),
        ("```\ndef f(n):\n    pass\n```\n```\ndef factorial(n):\n    pass\n```", "def f(n):\n    pass\n"),
    ],
)
def test_the_program_in_an_answer(text, program):
    assert program_of(text, "f") == program


def suite_of(*questions: str) -> Suite:
    return Suite("own", tuple(BenchPrompt(f"p{i}", (f"{q}\nThink.",)) for i, q in enumerate(questions)))


def write(path, rows) -> None:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")


def decode(token_ids) -> str:
    return "".join(map(chr, token_ids))


def ids(text: str) -> list[int]:
    return list(map(ord, text))


def test_numbers_are_compared_exactly(tmp_path):
    tasks = [{"question": "One?", "answer": "So\n#### 1,000"}, {"question": "Two?", "answer": "#### 2"}]
    write(tmp_path / "own_test_answers.jsonl", tasks)
    grader = build_graders([suite_of("Two?", "One?")], tmp_path, decode, runs_code=False)["own"]
    assert grader.is_solved("p0", ids("It is 2."))
    assert not grader.is_solved("p0", ids("It is 2.5"))
    assert grader.is_solved("p1", ids("It is 1000.0"))
    assert not grader.is_solved("p1", ids("no number"))


def test_programs_are_run_only_when_asked_for(tmp_path):
    task = {
        "prompt": "import math\n\ndef half(x):\n    ...",
        "test": "def check(candidate):\n    assert candidate(4) == 2",
        "entry_point": "half",
    }
    write(tmp_path / "own_tests.jsonl", [task])
    suite = suite_of(task["prompt"])
    assert build_graders([suite], tmp_path, decode, runs_code=False) == {}
    grader = build_graders([suite], tmp_path, decode, runs_code=True)["own"]
    # What the question imports is there, as the answer may count on it.
    assert grader.is_solved("p0", ids("```python\ndef half(x):\n    return math.floor(x / 2)\n```"))
    assert not grader.is_solved("p0", ids("```python\ndef half(x):\n    return x\n```"))
    assert not grader.is_solved("p0", ids("I do not know."))


def test_suites_without_tasks_have_no_grader(tmp_path):
    assert build_graders([suite_of("One?")], tmp_path, decode, runs_code=True) == {}
    assert build_graders([suite_of("One?")], None, decode, runs_code=True) == {}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{broken", "line 1: not a task"),
        ('{"question": "One?"}', "line 1: not a task"),
        ('{"question": "One?", "answer": "none"}', "line 1: not a task"),
        ('{"question": "Other?", "answer": "#### 1"}', "no task for prompt 'p0'"),
    ],
)
def test_damaged_or_foreign_tasks_are_named(tmp_path, content, named):
    (tmp_path / "own_test_answers.jsonl").write_text(content + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=named):
        build_graders([suite_of("One?")], tmp_path, decode, runs_code=False)


def test_helpers_of_the_question_are_there(tmp_path):
    """An answer holds the function that was asked for; what stands before it in the question is given."""
    task = {
        "prompt": "def twice(x):\n    return 2 * x\n\n\ndef half(x):\n    ...",
        "test": "def check(candidate):\n    assert candidate(twice(4)) == 4",
        "entry_point": "half",
    }
    write(tmp_path / "own_tests.jsonl", [task])
    grader = build_graders([suite_of(task["prompt"])], tmp_path, decode, runs_code=True)["own"]
    assert grader.is_solved("p0", ids("```python\ndef half(x):\n    return x / 2\n```"))
    assert not grader.is_solved("p0", ids("```python\ndef half(x):\n    return None\n\n\nexit()\n```"))
