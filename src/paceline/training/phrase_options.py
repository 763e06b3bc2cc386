"""Everything that `paceline train phrase` can be told beside what all heads share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.config import check_known
from paceline.heads.phrase import INPUTS
from paceline.training.options import Check, TrainingOptions

LOSSES = ("longest", "mass", "mean_mass")


@dataclass(frozen=True)
class PhraseTrainingOptions(TrainingOptions):
    """Options of a phrase head.

    Attributes:
        feature_layers: layers whose inputs are recorded, and read by the head, beside the final hidden state.
        inputs: vectors that the head reads besides those layers, of `heads.phrase.INPUTS`; None for all of
            them, or for those of `init`.
        entries: phrases; those of `init` stay as they are.
        max_words: most words of a phrase.
        criterion: how phrases are chosen: `accepted` or `count`.
        width: columns of the head's output layer.
        depth: layers before it.
        chain_entries: phrases that may follow another one; 0 for one phrase at a time; None for 4,000, or for
            those of `init`.
        ranking_width: columns of a ranking that chooses the phrases which are scored (a speculated
            vocabulary); 0: all are scored; None: likewise, or as in `init`.
        dropout: in the head.
        loss: `longest` entry, `mass` of the deepest node reached, or `mean_mass` along the text.
        weight_decay: of AdamW.
        train_batch_size: samples per step.
        patience: epochs without improvement on held-out prompts before stopping.
        ema_decay: of the averaged weights that are evaluated and exported; 0 takes the last weights.
    """

    command: ClassVar[str] = "phrase"
    stages: ClassVar[tuple[str, ...]] = ("prompts", "answers", "vocabulary", "fit", "evaluation", "export")

    feature_layers: tuple[int, ...] = ()
    inputs: tuple[str, ...] | None = None
    entries: int = 8000
    max_words: int = 3
    criterion: str = "accepted"
    width: int = 256
    depth: int = 2
    chain_entries: int | None = None
    ranking_width: int | None = None
    dropout: float = 0.1
    loss: str = "longest"
    weight_decay: float = 0.05
    train_batch_size: int = 2048
    patience: int = 2
    ema_decay: float = 0.0

    def check_names(self) -> None:
        """Refuse words that are not known."""
        super().check_names()
        check_known("loss", self.loss, LOSSES)
        for name in self.inputs or ():
            check_known("input", name, INPUTS)
        check_known("criterion", self.criterion, ("accepted", "count"))

    def checks(self) -> list[Check]:
        """Ranges."""
        return [
            *super().checks(),
            *self.at_least_one("entries", "width", "depth", "train_batch_size", "patience"),
            ("chain_entries", (self.chain_entries or 0) >= 0, "0 or more"),
            ("ranking_width", (self.ranking_width or 0) >= 0, "0 or more"),
            ("inputs", self.inputs is None or self._reads_something, "different names, at least one"),
            ("dropout", 0 <= self.dropout < 1, "at least 0 and below 1"),
            ("ema_decay", 0 <= self.ema_decay < 1, "at least 0 and below 1"),
            ("weight_decay", self.weight_decay >= 0, "0 or more"),
            ("max_words", 1 <= self.max_words <= 5, "between 1 and 5"),
        ]

    @property
    def recorded_layers(self) -> tuple[int, ...]:
        """Those that the head reads."""
        return self.feature_layers

    @property
    def _reads_something(self) -> bool:
        """Whether the head has an input, and none twice."""
        inputs = self.inputs or ()
        return len(set(inputs)) == len(inputs) and bool(inputs or self.feature_layers)
