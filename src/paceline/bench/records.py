"""What a benchmark writes down as it goes, and how an interrupted run finds its place again.

`records.jsonl` starts with one line of settings; every finished (suite, batch, group, arm) adds a line.
Starting the same command again reads the file, keeps what is complete and goes on. Other settings are
refused: figures of two different runs must never meet in one table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.engine.stats import GenerationStatistics
from paceline.errors import ConfigError

RECORDS_FILE = "records.jsonl"
NATURAL, FIXED = "natural", "fixed"


@dataclass(frozen=True, slots=True)
class RecordKey:
    """Names one measurement: an arm on one group of prompts.

    Attributes:
        suite: of the prompts.
        batch_size: of the group.
        group: its number.
        arm: who answers.
        work: `natural`, answers end by themselves; or `fixed`, all have the same number of tokens.
    """

    suite: str
    batch_size: int
    group: int
    arm: str
    work: str = NATURAL


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One answer to one message.

    Attributes:
        prompt_id: which prompt.
        turn: 0 for its first message.
        prompt_ids: token ids that the arm was given.
        token_ids: token ids that it emitted.
        statistics: of the engine; None for baselines.
        log_prob: of the emitted tokens under the target; None where it was not asked for.
        is_cut: ended by its length; None for baselines.
    """

    prompt_id: str
    turn: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    statistics: GenerationStatistics | None
    log_prob: float | None = None
    is_cut: bool | None = None


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """One measurement.

    Attributes:
        key: what was measured.
        seconds: wall time of all turns of the group, prompts included.
        turns: every answer.
    """

    key: RecordKey
    seconds: float
    turns: tuple[TurnRecord, ...]

    @property
    def num_tokens(self) -> int:
        """Emitted tokens."""
        return sum(len(turn.token_ids) for turn in self.turns)

    def as_dict(self) -> Mapping[str, Any]:
        """Ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> GroupRecord:
        """Read back what `as_dict` wrote."""
        turns = tuple(
            TurnRecord(
                turn["prompt_id"],
                turn["turn"],
                tuple(turn["prompt_ids"]),
                tuple(turn["token_ids"]),
                None if turn["statistics"] is None else GenerationStatistics(**turn["statistics"]),
                turn.get("log_prob"),
                turn.get("is_cut"),
            )
            for turn in stored["turns"]
        )
        return cls(RecordKey(**stored["key"]), stored["seconds"], turns)


class Journal:
    """The records of one run, on disk when a folder is given.

    Args:
        folder: created when needed; None keeps the records in memory only.
        settings: everything that makes two runs comparable; must be JSON.

    Raises:
        ConfigError: the folder holds a run with other settings.
    """

    def __init__(self, folder: Path | None, settings: Mapping[str, Any]) -> None:
        self._records: dict[RecordKey, GroupRecord] = {}
        self._path = None if folder is None else folder / RECORDS_FILE
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = _complete_lines(self._path)
        if lines:
            _check_settings(json.loads(lines[0]), json.loads(json.dumps(settings)), self._path)
            for line in lines[1:]:
                record = GroupRecord.from_dict(json.loads(line))
                self._records[record.key] = record
        else:
            self._write(settings)

    def __contains__(self, key: RecordKey) -> bool:
        """Whether a measurement is complete."""
        return key in self._records

    def __iter__(self) -> Iterator[GroupRecord]:
        """All records, oldest first."""
        return iter(self._records.values())

    def __len__(self) -> int:
        """Number of records."""
        return len(self._records)

    def add(self, record: GroupRecord) -> None:
        """Keep a measurement; it is on disk when this returns."""
        self._records[record.key] = record
        self._write(record.as_dict())

    def _write(self, content: Mapping[str, Any]) -> None:
        """Append one line."""
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(content, ensure_ascii=False) + "\n")


def _complete_lines(path: Path) -> list[str]:
    """Lines of the file; a last one that an interruption cut short is removed from it."""
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) != len(content):
        path.write_bytes(whole)
    return whole.decode("utf-8").split("\n")[:-1]


def _check_settings(found: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    """Refuse to mix runs, naming what differs."""
    different = [name for name in sorted({*found, *wanted}) if found.get(name) != wanted.get(name)]
    if different:
        name = different[0]
        raise ConfigError(
            f"{str(path)!r} holds a run with other settings ({', '.join(different)}; {name} was "
            f"{found.get(name)!r}, now {wanted.get(name)!r}): choose another --out, or delete that file"
        )
