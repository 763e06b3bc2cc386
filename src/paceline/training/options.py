"""What every `paceline train` command can be told; each kind of head adds its own (`*_options.py`)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from paceline.config import DTYPES, check_known
from paceline.errors import ConfigError

Check = tuple[str, bool, str]
"""An option, whether its value is fine, and the range in words."""


@dataclass(frozen=True)
class TrainingOptions:
    """Options that all heads share; each stage depends on a few of them (see `pipeline`).

    Attributes:
        out: folder of the finished head.
        target: alias, folder, GGUF file or Hub id.
        data: JSONL files, folders of them, Hub names.
        exclude: the same, of prompts that must not be trained on.
        work: run folder; by default `out` with `.work` appended.
        synthesise: prompts that the target writes; None means 4,000 when there are no data, else 0.
        max_per_source: most prompts of one data file.
        held_out: fraction of conversations kept for evaluation.
        num_tokens: output tokens to generate.
        max_new_tokens: most tokens of an answer.
        temperature: of the answers; 0 is greedy.
        follow_ups: fraction of synthesised conversations that get a second turn.
        drafter: used while generating.
        head: its head.
        workers: processes that generate side by side.
        batch_size: answers generated at once by each.
        max_disk_gb: limit for the recorded states.
        drop_loops: train on answers only up to where they start to go round in circles.
        init: head folder to go on from.
        epochs: passes over the data.
        learning_rate: peak.
        check_prompts: held-out prompts that are answered through the engine at the end.
        num_speculative_tokens: drafted nodes in that check.
        export_dtype: of the stored weights.
        seed: of everything random.
        dtype: of the target.
        device: of the target and of the fit.
        trust_remote_code: allow code from the target's repository.
        stop_after: last stage to run.
    """

    command: ClassVar[str]
    """Word behind `paceline train`."""
    stages: ClassVar[tuple[str, ...]]
    """Names of its stages, in order."""
    record_prefix: ClassVar[str] = ""
    """Tells its stages from those of another kind in the same run folder."""

    out: Path
    target: str = "smollm2"
    data: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    work: Path | None = None
    synthesise: int | None = None
    max_per_source: int | None = None
    held_out: float = 0.02
    num_tokens: int = 1_000_000
    max_new_tokens: int = 320
    temperature: float = 0.0
    follow_ups: float = 0.3
    drafter: str = "none"
    head: Path | None = None
    workers: int = 1
    batch_size: int = 64
    max_disk_gb: float | None = None
    drop_loops: bool = False
    init: Path | None = None
    epochs: int = 12
    learning_rate: float = 2e-3
    check_prompts: int = 20
    num_speculative_tokens: int = 32
    export_dtype: str = "bf16"
    seed: int = 0
    dtype: str = "bf16"
    device: str = "auto"
    trust_remote_code: bool = False
    stop_after: str = "export"

    def __post_init__(self) -> None:
        """Refuse values out of range, naming the option, the value and the range."""
        self.check_names()
        for name, is_good, wanted in self.checks():
            if not is_good:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is {getattr(self, name)!r}: it must be {wanted}"
                )

    def check_names(self) -> None:
        """Refuse words that are not known; kinds of heads add theirs."""
        check_known("stage", self.stop_after, self.stages)
        check_known("dtype", self.dtype, ("auto", *DTYPES))
        check_known("dtype", self.export_dtype, DTYPES)

    def checks(self) -> list[Check]:
        """Ranges; kinds of heads add theirs."""
        return [
            *self.at_least_one("num_tokens", "max_new_tokens", "workers", "batch_size", "epochs"),
            ("held_out", 0 < self.held_out < 1, "between 0 and 1"),
            ("follow_ups", 0 <= self.follow_ups <= 1, "between 0 and 1"),
            ("temperature", self.temperature >= 0, "0 (greedy) or more"),
            ("learning_rate", self.learning_rate > 0, "above 0"),
            ("synthesise", self.synthesise is None or self.synthesise >= 0, "0 or more"),
            ("max_per_source", self.max_per_source is None or self.max_per_source >= 1, "at least 1"),
            ("max_disk_gb", self.max_disk_gb is None or self.max_disk_gb > 0, "above 0"),
            ("num_speculative_tokens", self.num_speculative_tokens >= 0, "0 or more"),
            ("check_prompts", self.check_prompts >= 0, "0 or more"),
        ]

    def at_least_one(self, *names: str) -> list[Check]:
        """Checks of counts."""
        return [(name, getattr(self, name) >= 1, "at least 1") for name in names]

    @property
    def recorded_layers(self) -> tuple[int, ...]:
        """Layers whose inputs are recorded beside the final hidden state while the target answers."""
        return ()

    @property
    def work_folder(self) -> Path:
        """Where the stages keep what they made."""
        return self.work if self.work is not None else self.out.with_name(f"{self.out.name}.work")

    @property
    def num_synthesised(self) -> int:
        """How many prompts the target writes."""
        if self.synthesise is not None:
            return self.synthesise
        return 0 if self.data else 4000

    def chosen(self, *names: str) -> dict[str, Any]:
        """Some options by name, ready for JSON."""
        return {name: _plain(getattr(self, name)) for name in names}

    def as_dict(self) -> dict[str, Any]:
        """All options, ready for JSON."""
        return self.chosen(*(f.name for f in fields(self)))


def _plain(value: Any) -> Any:
    """Paths as text, tuples as lists."""
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
