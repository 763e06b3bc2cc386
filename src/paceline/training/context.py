"""What all stages of a training run share: options, folders, the loaded target, the prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from paceline.errors import ConfigError
from paceline.training.options import TrainingOptions
from paceline.training.progress import Reporter
from paceline.training.prompts import TrainingPrompt, file_digest, is_held_out
from paceline.training.run_folder import RunFolder, stage_key
from paceline.training.workers import load_generator

OptionsT = TypeVar("OptionsT", bound=TrainingOptions, covariant=True)


class RunContext(Generic[OptionsT]):
    """Shared state of the stages.

    Args:
        options: what to do.
        reporter: where progress is told.
        load: makes the `Generator`; tests pass their own.
    """

    def __init__(
        self,
        options: OptionsT,
        reporter: Reporter | None = None,
        load: Callable[[TrainingOptions], Any] = load_generator,
    ) -> None:
        self.options = options
        self.reporter = reporter or Reporter()
        self.folder = RunFolder(options.work_folder)
        self._load = load
        self.key = ""
        """Key of the stage that is being run."""

    @cached_property
    def generator(self) -> Any:
        """The loaded target."""
        return self._load(self.options)

    def stage_folder(self, name: str) -> Path:
        """A folder of the current stage's own; other options get another, so trying them loses nothing."""
        return self.folder.root / f"{name}-{self.key[:8]}"

    @cached_property
    def answers_folder(self) -> Path:
        """Shards of this target under these decoding options."""
        dependencies = {
            **self.options.chosen("max_new_tokens", "temperature"),
            "feature_layers": list(self.options.recorded_layers),
            "seed": self.options.seed if self.options.temperature > 0 else None,
            "target": self.generator.target.fingerprint,
            "dtype": str(self.generator.target.dtype),
        }
        return self.folder.root / f"answers-{stage_key('', dependencies)[:8]}"

    @cached_property
    def synthesised_folder(self) -> Path:
        """Prompts that this target wrote under these options."""
        dependencies = {
            **self.options.chosen("seed", "follow_ups"),
            "target": self.generator.target.fingerprint,
            "dtype": str(self.generator.target.dtype),
        }
        return self.folder.root / f"synthesised-{stage_key('', dependencies)[:8]}"

    @property
    def prompts_file(self) -> Path:
        """Where the first stage writes the prompts that it chose."""
        return self.folder.root / "prompts.jsonl"

    @cached_property
    def prompts(self) -> tuple[TrainingPrompt, ...]:
        """The prompts that the first stage chose."""
        lines = self.prompts_file.read_text(encoding="utf-8").split("\n")
        return tuple(TrainingPrompt.from_dict(json.loads(line)) for line in lines if line)

    @cached_property
    def root_keys(self) -> frozenset[str]:
        """First prompts of all conversations of this run."""
        return frozenset(prompt.root_key for prompt in self.prompts)

    def is_training(self, root_key: str) -> bool:
        """Whether a conversation is one of this run's and may be trained on."""
        return root_key in self.root_keys and not is_held_out(root_key, self.options.held_out)

    def is_held_out(self, root_key: str) -> bool:
        """Whether a conversation is one of this run's and kept for evaluation."""
        return root_key in self.root_keys and is_held_out(root_key, self.options.held_out)


def location_digests(locations: tuple[str, ...]) -> dict[str, str]:
    """SHA-256 of every local file among the locations, by name."""
    found: dict[str, str] = {}
    for location in locations:
        path = Path(location)
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        found.update((str(file), file_digest(file)) for file in files if file.is_file())
    return found


def folder_digest(folder: Path, names: Seq[str]) -> str:
    """SHA-256 over files of a head folder.

    Raises:
        ConfigError: one is missing.
    """
    files = [folder / name for name in names]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ConfigError(f"{folder} is not a head folder: {', '.join(missing)} missing")
    return stage_key("", {file.name: file_digest(file) for file in files})
