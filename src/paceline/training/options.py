"""Everything that `paceline train phrase` can be told."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from paceline.config import DTYPES, check_known
from paceline.errors import ConfigError
from paceline.heads.phrase import INPUTS

STAGES = ("prompts", "answers", "vocabulary", "fit", "evaluation", "export")
LOSSES = ("longest", "mass", "mean_mass")


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Options of a training run; each stage depends on a few of them (see `pipeline`).

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
        feature_layers: layers whose inputs are recorded, and read by the head, beside the final hidden state.
        inputs: vectors that the head reads besides those layers, of `heads.phrase.INPUTS`; None for all of
            them, or for those of `init`.
        drafter: used while generating.
        head: its head.
        workers: processes that generate side by side.
        batch_size: answers generated at once by each.
        max_disk_gb: limit for the recorded states.
        entries: phrases.
        max_words: most words of a phrase.
        criterion: how phrases are chosen: `accepted` or `count`.
        drop_loops: train on answers only up to where they start to go round in circles.
        init: head folder to go on from; its phrases stay as they are.
        width: columns of the head's output layer.
        depth: layers before it.
        chain_entries: phrases that may follow another one; 0 for one phrase at a time; None for 4,000, or for
            those of `init`.
        dropout: in the head.
        loss: `longest` entry, `mass` of the deepest node reached, or `mean_mass` along the text.
        epochs: passes over the data.
        learning_rate: peak.
        weight_decay: of AdamW.
        train_batch_size: samples per step.
        patience: epochs without improvement on held-out prompts before stopping.
        ema_decay: of the averaged weights that are evaluated and exported; 0 takes the last weights.
        check_prompts: held-out prompts that are answered through the engine at the end.
        num_speculative_tokens: drafted nodes in that check.
        export_dtype: of the stored weights.
        seed: of everything random.
        dtype: of the target.
        device: of the target and of the fit.
        trust_remote_code: allow code from the target's repository.
        stop_after: last stage to run.
    """

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
    feature_layers: tuple[int, ...] = ()
    inputs: tuple[str, ...] | None = None
    drafter: str = "none"
    head: Path | None = None
    workers: int = 1
    batch_size: int = 64
    max_disk_gb: float | None = None
    entries: int = 8000
    max_words: int = 3
    criterion: str = "accepted"
    drop_loops: bool = False
    init: Path | None = None
    width: int = 256
    depth: int = 2
    chain_entries: int | None = None
    dropout: float = 0.1
    loss: str = "longest"
    epochs: int = 12
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    train_batch_size: int = 2048
    patience: int = 2
    ema_decay: float = 0.0
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
        check_known("stage", self.stop_after, STAGES)
        check_known("loss", self.loss, LOSSES)
        for name in self.inputs or ():
            check_known("input", name, INPUTS)
        check_known("criterion", self.criterion, ("accepted", "count"))
        check_known("dtype", self.dtype, ("auto", *DTYPES))
        check_known("dtype", self.export_dtype, DTYPES)
        for name, is_good, wanted in self._checks():
            if not is_good:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is {getattr(self, name)!r}: it must be {wanted}"
                )

    def _checks(self) -> list[tuple[str, bool, str]]:
        """Field, whether its value is fine, and the range in words."""
        positive = (
            "num_tokens",
            "max_new_tokens",
            "workers",
            "batch_size",
            "entries",
            "width",
            "depth",
            "epochs",
            "train_batch_size",
            "patience",
        )
        return [
            *((name, getattr(self, name) >= 1, "at least 1") for name in positive),
            ("chain_entries", (self.chain_entries or 0) >= 0, "0 or more"),
            ("inputs", self.inputs is None or self._reads_something, "different names, at least one"),
            ("held_out", 0 < self.held_out < 1, "between 0 and 1"),
            ("follow_ups", 0 <= self.follow_ups <= 1, "between 0 and 1"),
            ("dropout", 0 <= self.dropout < 1, "at least 0 and below 1"),
            ("ema_decay", 0 <= self.ema_decay < 1, "at least 0 and below 1"),
            ("temperature", self.temperature >= 0, "0 (greedy) or more"),
            ("learning_rate", self.learning_rate > 0, "above 0"),
            ("weight_decay", self.weight_decay >= 0, "0 or more"),
            ("synthesise", self.synthesise is None or self.synthesise >= 0, "0 or more"),
            ("max_per_source", self.max_per_source is None or self.max_per_source >= 1, "at least 1"),
            ("max_disk_gb", self.max_disk_gb is None or self.max_disk_gb > 0, "above 0"),
            ("max_words", 1 <= self.max_words <= 5, "between 1 and 5"),
            ("num_speculative_tokens", self.num_speculative_tokens >= 0, "0 or more"),
            ("check_prompts", self.check_prompts >= 0, "0 or more"),
        ]

    @property
    def _reads_something(self) -> bool:
        """Whether the head has an input, and none twice."""
        inputs = self.inputs or ()
        return len(set(inputs)) == len(inputs) and bool(inputs or self.feature_layers)

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
