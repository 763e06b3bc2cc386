"""Whether an answer solves its task: exact numbers, and programs that pass their tests.

`NAME_test_answers.jsonl` beside a suite `NAME.jsonl` holds `question` and `answer`, whose last line is
`#### NUMBER` (GSM8K); `NAME_tests.jsonl` holds `prompt`, `test` and `entry_point` (HumanEval). A task belongs
to the prompt of the suite that contains its question.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from collections.abc import Sequence as Seq
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Protocol

from paceline.bench.sandbox import runs_to_its_end
from paceline.bench.suites import Suite
from paceline.errors import ConfigError

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
_FENCE = re.compile(r"```(?:[Pp]ython)?[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)


class Grader(Protocol):
    """Judges the answers of one suite."""

    def is_solved(self, prompt_id: str, token_ids: Seq[int]) -> bool:
        """Whether an answer is right."""


class TextGrader:
    """Judges by text, each answer once.

    Args:
        judges: prompt id -> what says whether a text is right.
        decode: token ids -> text.
    """

    def __init__(self, judges: dict[str, Callable[[str], bool]], decode: Callable[[Seq[int]], str]) -> None:
        self._judges = judges
        self._decode = decode
        self._known: dict[tuple[str, tuple[int, ...]], bool] = {}

    def is_solved(self, prompt_id: str, token_ids: Seq[int]) -> bool:
        """Whether an answer is right."""
        key = (prompt_id, tuple(token_ids))
        if key not in self._known:
            self._known[key] = self._judges[prompt_id](self._decode(token_ids))
        return self._known[key]


def build_graders(
    suites: Seq[Suite], data_folder: Path | None, decode: Callable[[Seq[int]], str], *, runs_code: bool
) -> dict[str, Grader]:
    """Graders of those suites that have tasks in the data folder.

    Args:
        suites: of the run.
        data_folder: where the files lie.
        decode: token ids -> text.
        runs_code: whether programs that the model wrote may be run.

    Raises:
        ConfigError: a file is damaged, or a prompt of its suite has no task.
    """
    graders: dict[str, Grader] = {}
    for suite in suites if data_folder is not None else ():
        assert data_folder is not None
        numbers = data_folder / f"{suite.name}_test_answers.jsonl"
        programs = data_folder / f"{suite.name}_tests.jsonl"
        if numbers.is_file():
            graders[suite.name] = TextGrader(_judges(suite, numbers, "question", _number_judge), decode)
        elif runs_code and programs.is_file():
            graders[suite.name] = TextGrader(_judges(suite, programs, "prompt", _program_judge), decode)
    return graders


def final_number(text: str) -> Decimal | None:
    """The number that an answer ends in: that in its last box, else the last one at all."""
    boxed = text.rfind("\\boxed{")
    if boxed >= 0:
        found = _NUMBER.findall(text[boxed:].split("}", 1)[0])
        if found:
            return _decimal(found[-1])
    found = _NUMBER.findall(text)
    return _decimal(found[-1]) if found else None


def program_of(text: str, entry_point: str) -> str:
    """The program in an answer: the last block of code that defines the function, else the whole text."""
    defines = re.compile(rf"^def {re.escape(entry_point)}\s*\(", re.MULTILINE)
    blocks = [block for block in _FENCE.findall(text) if defines.search(block)]
    return blocks[-1] if blocks else text


def _judges(
    suite: Suite, path: Path, field: str, judge_of: Callable[[dict[str, Any]], Callable[[str], bool]]
) -> dict[str, Callable[[str], bool]]:
    """A judge for every prompt of a suite."""
    tasks = []
    for number, line in enumerate(path.read_text("utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            task = json.loads(line)
            tasks.append((str(task[field]).strip(), judge_of(task)))
        except (json.JSONDecodeError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(f"{path.name}, line {number}: not a task ({error!r})") from None
    judges = {}
    for prompt in suite.prompts:
        own = [judge for question, judge in tasks if question in prompt.turns[0]]
        if not own:
            raise ConfigError(
                f"{path.name} has no task for prompt {prompt.prompt_id!r} of suite {suite.name!r}: the two "
                "files must hold the same questions"
            )
        judges[prompt.prompt_id] = own[-1]
    return judges


def _number_judge(task: dict[str, Any]) -> Callable[[str], bool]:
    """Right is what ends in the number behind `####`."""
    expected = _decimal(_NUMBER.findall(str(task["answer"]).rsplit("####", 1)[-1])[-1])
    if expected is None:
        raise ValueError(f"no number in {task['answer']!r}")
    return lambda text: final_number(text) == expected


def _program_judge(task: dict[str, Any]) -> Callable[[str], bool]:
    """Right is what passes the tests."""
    entry_point, test = str(task["entry_point"]), str(task["test"])
    # What the question imports and defines before the function is not always repeated in the answer.
    function = re.compile(rf"^def {re.escape(entry_point)}\b", re.MULTILINE)
    header = function.split(str(task["prompt"]), maxsplit=1)[0]

    def judge(text: str) -> bool:
        program = program_of(text, entry_point)
        return runs_to_its_end(f"{header}\n{program}\n{test}\ncheck({entry_point})\n")

    return judge


def _decimal(number: str) -> Decimal | None:
    """A number as written, thousands separators removed."""
    try:
        return Decimal(number.replace(",", "")).normalize()
    except InvalidOperation:
        return None
