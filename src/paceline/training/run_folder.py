"""Which stages of a training run are done, and with which options.

Every stage leaves a small JSON file with a key: a hash of the options it depends on and of the key of the
stage before it. A stage whose key is unchanged is not run again; changing an option redoes the stages from
the first one that depends on it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError, ConfigError


class RunFolder:
    """The folder of one training run.

    Args:
        root: made when it does not exist.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def figures(self, stage: str, key: str) -> dict[str, Any] | None:
        """What the stage reported when it finished under `key`; None when it did not."""
        record = self._record(stage)
        if record is None or record.get("key") != key:
            return None
        figures: dict[str, Any] = record["figures"]
        return figures

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out of the folder inside the block.

        Raises:
            ConfigError: one is at work there already.
        """
        from filelock import FileLock, Timeout

        lock = FileLock(self.root / "run.lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise ConfigError(
                f"another training run is at work in {self.root}: wait for it, or give --work"
            ) from None
        try:
            yield
        finally:
            lock.release()

    def finish(self, stage: str, key: str, figures: Mapping[str, Any]) -> None:
        """Note that a stage is complete."""
        write_json(self._path(stage, "json"), {"key": key, "figures": dict(figures)})

    def _record(self, stage: str) -> dict[str, Any] | None:
        path = self._path(stage, "json")
        if not path.exists():
            return None
        try:
            record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise CheckpointError(
                f"{path} is not JSON ({error.msg}): delete it to run the stage again"
            ) from None
        return record

    def _path(self, stage: str, ending: str) -> Path:
        return self.root / f"{stage}.stage.{ending}"


def stage_key(previous: str, options: Mapping[str, Any]) -> str:
    """Hash of a stage's options and of the stage before it: 16 hexadecimal digits."""
    text = json.dumps([previous, options], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write text atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
