"""Prompt suites: our own small ones, and any folder of JSONL files.

A file holds one JSON object a line with `turns` (a list of user messages), or a single message under
`prompt`, `question` or `instruction`. `question_id` or `task_id` names a prompt; without one its line
number does.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from paceline.config import nearest_name
from paceline.errors import ConfigError

BUILTIN_SUITES = ("builtin", "check", "rare")
_MESSAGE_FIELDS = ("prompt", "question", "instruction")
_ID_FIELDS = ("question_id", "task_id", "id")


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One prompt.

    Attributes:
        prompt_id: unique within its suite.
        turns: user messages in order, at least one.
        category: kind of task, empty when the file has none.
    """

    prompt_id: str
    turns: tuple[str, ...]
    category: str = ""


@dataclass(frozen=True, slots=True)
class Suite:
    """Prompts that are reported together.

    Attributes:
        name: as asked for.
        prompts: in file order.
    """

    name: str
    prompts: tuple[BenchPrompt, ...]

    @property
    def digest(self) -> str:
        """Identifies the selected prompts and their wording."""
        content = json.dumps([[p.prompt_id, *p.turns] for p in self.prompts], ensure_ascii=False)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def load_suite(name: str, data_folder: Path | None = None, limit: int | None = None) -> Suite:
    """Read a suite and take `limit` prompts evenly spaced over it.

    Args:
        name: a built-in suite, or the name of a `.jsonl` file in `data_folder`.
        data_folder: where public suites lie.
        limit: most prompts; None takes all.

    Raises:
        ConfigError: the suite does not exist or holds something else than prompts.
    """
    return _suite(name, _suite_lines(name, data_folder), limit)


def read_suite(path: Path, limit: int | None = None) -> Suite:
    """Likewise from a file, whatever its name; ConfigError unless it is a `.jsonl` file of prompts."""
    if not (path.is_file() and path.suffix == ".jsonl"):
        raise ConfigError(f"{str(path)!r} is no .jsonl file: give a file of prompts")
    return _suite(path.stem, path.read_text("utf-8").split("\n"), limit)


def spaced_indices(num_items: int, limit: int | None) -> list[int]:
    """`limit` indices, evenly spaced over `num_items`.

    Neighbours in a file resemble each other, so the first few would not stand for the whole.
    """
    if limit is None or limit >= num_items:
        return list(range(num_items))
    return [i * num_items // limit for i in range(limit)]


def _suite(name: str, lines: list[str], limit: int | None) -> Suite:
    """`limit` prompts of a file's lines."""
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}: take at least 1 prompt")
    prompts = _read_prompts(name, lines)
    return Suite(name, tuple(prompts[i] for i in spaced_indices(len(prompts), limit)))


def _suite_lines(name: str, data_folder: Path | None) -> list[str]:
    """The lines of a suite's file."""
    if name in BUILTIN_SUITES:
        return files("paceline.bench").joinpath("prompts", f"{name}.jsonl").read_text("utf-8").split("\n")
    if data_folder is None:
        raise ConfigError(
            f"suite {name!r} is not built in ({', '.join(BUILTIN_SUITES)}): give the folder of {name}.jsonl "
            "with --data (docs/benchmarks.md says where public ones are from)"
        )
    path = data_folder / f"{name}.jsonl"
    if not path.is_file():
        found = sorted(p.stem for p in data_folder.glob("*.jsonl"))
        hint = f"did you mean {nearest_name(name, found)!r}?" if found else "there is no .jsonl file at all"
        raise ConfigError(f"no suite {name!r} in {str(data_folder)!r}: {hint}")
    return path.read_text("utf-8").split("\n")


def _read_prompts(name: str, lines: list[str]) -> list[BenchPrompt]:
    """Parse the lines; ids are made unique by their line number where a file repeats one."""
    prompts: list[BenchPrompt] = []
    seen: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"suite {name!r}, line {number}: not JSON ({error.msg})") from None
        turns = _turns(item)
        if not turns:
            raise ConfigError(
                f"suite {name!r}, line {number}: no messages; an object with 'turns' (a list of texts) or "
                f"one of {', '.join(map(repr, _MESSAGE_FIELDS))} is needed"
            )
        found = next((str(item[field]) for field in _ID_FIELDS if field in item), str(number))
        prompt_id = found if found not in seen else f"{found}#{number}"
        seen.add(prompt_id)
        prompts.append(BenchPrompt(prompt_id, turns, str(item.get("category", ""))))
    if not prompts:
        raise ConfigError(f"suite {name!r} holds no prompts")
    return prompts


def _turns(item: Any) -> tuple[str, ...]:
    """User messages of one object; empty when it has none or is something else."""
    if not isinstance(item, dict):
        return ()
    turns = item.get("turns")
    if isinstance(turns, list) and all(isinstance(turn, str) and turn for turn in turns):
        return tuple(turns)
    message = next((item[field] for field in _MESSAGE_FIELDS if isinstance(item.get(field), str)), "")
    return (message,) if message and turns is None else ()
