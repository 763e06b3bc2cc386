"""Training prompts: read, cleaned of duplicates and benchmark items, shuffled, split.

A prompt is a conversation up to a user's turn. Which side of the held-out split it falls on depends on the
text of its first user turn alone, so adding data or changing the seed never moves a prompt from one side to
the other.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError

Message = Mapping[str, str]
_TEXT_FIELDS = ("question", "instruction", "prompt", "text")


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """A conversation that waits for the assistant's turn.

    Attributes:
        messages: `{"role", "content"}` turns, the last one the user's.
        source: where it comes from (file stem, Hub name or kind of synthesis).
        follow_ups: user turns to ask afterwards, once the target has answered.
        root: key of the first prompt of this conversation; empty when this is the first.
    """

    messages: tuple[Message, ...]
    source: str
    follow_ups: tuple[str, ...] = ()
    root: str = ""

    @property
    def key(self) -> str:
        """Identifies the conversation so far: 16 hexadecimal digits of its SHA-256."""
        turns = [(message["role"], message["content"]) for message in self.messages]
        return _digest(json.dumps(turns, ensure_ascii=False))

    @property
    def root_key(self) -> str:
        """Key of the first prompt of the conversation: what the held-out split looks at."""
        return self.root or self.key

    def followed(self, answer: str) -> TrainingPrompt | None:
        """The conversation's next prompt, after `answer`; None when there is none."""
        if not self.follow_ups or not answer.strip():
            return None
        turns = ({"role": "assistant", "content": answer}, {"role": "user", "content": self.follow_ups[0]})
        return TrainingPrompt((*self.messages, *turns), self.source, self.follow_ups[1:], self.root_key)

    def as_dict(self) -> dict[str, Any]:
        """The fields, ready for JSON."""
        return {
            "messages": [dict(message) for message in self.messages],
            "source": self.source,
            "follow_ups": list(self.follow_ups),
            "root": self.root,
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> TrainingPrompt:
        """The prompt that `as_dict` described."""
        return cls(tuple(fields["messages"]), fields["source"], tuple(fields["follow_ups"]), fields["root"])

    @classmethod
    def from_text(cls, text: str, source: str, follow_ups: tuple[str, ...] = ()) -> TrainingPrompt:
        """A conversation of one user turn."""
        return cls(({"role": "user", "content": text},), source, follow_ups)


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts ready to be answered, and what was dropped on the way.

    Attributes:
        prompts: unique, shuffled.
        num_duplicates: dropped because the same conversation came before.
        num_excluded: dropped because a text of theirs is on an exclusion list.
    """

    prompts: tuple[TrainingPrompt, ...]
    num_duplicates: int
    num_excluded: int


def is_held_out(root_key: str, fraction: float) -> bool:
    """Whether a conversation belongs to the held-out side."""
    return int(root_key[:8], 16) < fraction * 2**32


def read_prompts(locations: Iterable[str]) -> Iterator[TrainingPrompt]:
    """Prompts of JSONL files, folders of them, or Hub data sets, in order.

    Raises:
        ConfigError: a location does not exist, or a row has none of the known fields.
    """
    for location in locations:
        path = Path(location)
        if path.is_dir():
            files = sorted(path.glob("*.jsonl"))
            if not files:
                raise ConfigError(f"folder {location!r} has no .jsonl file")
            for file in files:
                yield from _read_file(file)
        elif path.is_file():
            yield from _read_file(path)
        elif location.endswith(".jsonl") or location.count("/") > 1:
            raise ConfigError(
                f"no prompts at {location!r}: give a .jsonl file, a folder of them, or a Hub name"
            )
        else:
            yield from _read_hub(location)


def _read_file(path: Path) -> Iterator[TrainingPrompt]:
    """Prompts of one JSONL file."""
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path.name} line {number} is not JSON: {error.msg}") from None
        yield prompt_from_row(row, path.stem, f"{path.name} line {number}")


def _read_hub(name: str) -> Iterator[TrainingPrompt]:
    """Prompts of the `train` split of a Hub data set."""
    import datasets

    try:
        rows = datasets.load_dataset(name, split="train")
    except Exception as error:
        raise ConfigError(
            f"{name!r} is neither a file, a folder nor a Hub data set in reach: {error}"
        ) from None
    for number, row in enumerate(rows):
        yield prompt_from_row(row, name, f"{name} row {number}")


def prompt_from_row(row: object, source: str, where: str) -> TrainingPrompt:
    """The prompt in one row of data.

    Args:
        row: has `messages`, `turns`, `question`, `instruction` (with an optional `input`), `prompt` or
            `text`.
        source: name of its file or data set.
        where: for the error message.
    """
    if isinstance(row, Mapping):
        if isinstance(row.get("messages"), list):
            messages = _until_user(row["messages"])
            if messages:
                return TrainingPrompt(messages, source)
        turns = row.get("turns")
        if (
            isinstance(turns, list)
            and turns
            and all(isinstance(turn, str) and turn.strip() for turn in turns)
        ):
            return TrainingPrompt.from_text(turns[0].strip(), source, tuple(turns[1:]))
        for field in _TEXT_FIELDS:
            text = row.get(field)
            if isinstance(text, str) and text.strip():
                extra = _input_of(row)
                return TrainingPrompt.from_text(
                    f"{text.strip()}\n\n{extra}" if extra else text.strip(), source
                )
    raise ConfigError(
        f"{where} has no prompt: give one of the fields messages, turns, {', '.join(_TEXT_FIELDS)}, with text"
    )


def _until_user(turns: Seq[object]) -> tuple[Message, ...]:
    """Known turns up to the last user's; empty when there is none."""
    kept = [
        {"role": str(turn["role"]), "content": str(turn["content"])}
        for turn in turns
        if isinstance(turn, Mapping)
        and turn.get("role") in ("system", "user", "assistant")
        and turn.get("content")
    ]
    while kept and kept[-1]["role"] != "user":
        kept.pop()
    return tuple(kept)


def _input_of(row: Mapping[str, Any]) -> str:
    """The text that an instruction works on, as the instruction data sets spell it."""
    own = row.get("input")
    if not own and isinstance(row.get("instances"), list) and row["instances"]:
        own = row["instances"][0].get("input")
    return own.strip() if isinstance(own, str) else ""


def read_exclusions(locations: Iterable[str]) -> frozenset[str]:
    """Normalised texts of prompts that must not be trained on, every turn of them."""
    texts: set[str] = set()
    for prompt in read_prompts(locations):
        texts.update(normalised(m["content"]) for m in prompt.messages if m["role"] == "user")
        texts.update(normalised(turn) for turn in prompt.follow_ups)
    return frozenset(texts)


def normalised(text: str) -> str:
    """`text` without case and spacing, for comparing prompts."""
    return " ".join(text.casefold().split())


def select_prompts(
    prompts: Iterable[TrainingPrompt],
    *,
    seed: int,
    excluded: frozenset[str] = frozenset(),
    max_per_source: int | None = None,
) -> PromptSet:
    """Drop duplicates and excluded prompts, limit each source, shuffle.

    Args:
        prompts: in a fixed order.
        seed: of the shuffle and of the choice within a source.
        excluded: normalised texts of user turns.
        max_per_source: most prompts from one source; None keeps all.
    """
    unique: dict[str, TrainingPrompt] = {}
    num_duplicates = num_excluded = 0
    for prompt in prompts:
        texts = [m["content"] for m in prompt.messages if m["role"] == "user"]
        if any(normalised(text) in excluded for text in (*texts, *prompt.follow_ups)):
            num_excluded += 1
        elif prompt.key in unique:
            num_duplicates += 1
        else:
            unique[prompt.key] = prompt
    ordered = [unique[key] for key in sorted(unique)]
    random.Random(seed).shuffle(ordered)
    if max_per_source is not None:
        seen: dict[str, int] = {}
        kept = []
        for prompt in ordered:
            seen[prompt.source] = seen.get(prompt.source, 0) + 1
            if seen[prompt.source] <= max_per_source:
                kept.append(prompt)
        ordered = kept
    return PromptSet(tuple(ordered), num_duplicates, num_excluded)


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]
