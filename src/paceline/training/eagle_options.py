"""Everything that `paceline train eagle3` can be told beside what all heads share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.config import check_known
from paceline.training.eagle_texts import DEFAULT_MAX_LEN
from paceline.training.options import Check, TrainingOptions
from paceline.training.unrolled import DEFAULT_STEPS, STEP_DECAY

VOCABULARIES = ("full", "static", "speculative")
FEATURES = ("online", "cached")


@dataclass(frozen=True)
class EagleTrainingOptions(TrainingOptions):
    """Options of an EAGLE-3 head.

    Attributes:
        vocabulary: what the head is trained to score with: `full` (the target's output layer, frozen),
            `speculative` (the same, and a ranking that learns beside it) or `static` (rows of its own, of the
            most frequent tokens, as EAGLE-3's authors train). Heads of the first two may draft with a static
            vocabulary too, whose ids are chosen here and change nothing of the fit.
        static_entries: tokens of the static vocabulary; None for a quarter of all, at most 32,000.
        static_corpus: JSONL files, folders or Hub names whose tokens are counted for it, as FR-Spec does; by
            default those of the target's answers, as VocabTrim does.
        ranking_width: columns between the two matrices of the ranking; None for an eighth of the hidden size.
        feature_layers: layers whose inputs are fused; None for EAGLE-3's choice, or that of `init`.
        intermediate_size: of the head's MLP; this and the next three are by default as in the target.
        num_heads: attention heads.
        num_kv_heads: heads of keys and values.
        head_dim: their width.
        features: `online` reads the texts with the target in every epoch, `cached` once, onto the disk.
        batch_tokens: tokens of a step, padding included.
        max_len: most tokens of a text, its prompt included.
        num_steps: steps of the training-time test.
        step_decay: what a step counts, to the power of its number.
        loss_fraction: share of the positions that the loss is taken at, drawn anew for every batch; the
            output layer, which costs most, is computed for those alone.
        gradient_norm: at which gradients are clipped.
    """

    command: ClassVar[str] = "eagle3"
    record_prefix: ClassVar[str] = "eagle3-"
    stages: ClassVar[tuple[str, ...]] = ("prompts", "answers", "fit", "vocabulary", "evaluation", "export")

    epochs: int = 3
    learning_rate: float = 1e-3
    vocabulary: str = "speculative"
    static_entries: int | None = None
    static_corpus: tuple[str, ...] = ()
    ranking_width: int | None = None
    feature_layers: tuple[int, ...] | None = None
    intermediate_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    features: str = "online"
    batch_tokens: int = 2048
    max_len: int = DEFAULT_MAX_LEN
    num_steps: int = DEFAULT_STEPS
    step_decay: float = STEP_DECAY
    loss_fraction: float = 1.0
    gradient_norm: float = 0.5

    def check_names(self) -> None:
        """Refuse words that are not known."""
        super().check_names()
        check_known("vocabulary", self.vocabulary, VOCABULARIES)
        check_known("features", self.features, FEATURES)

    def checks(self) -> list[Check]:
        """Ranges."""
        layers = self.feature_layers
        sizes = (
            "static_entries", "ranking_width", "intermediate_size", "num_heads", "num_kv_heads", "head_dim",
        )  # fmt: skip
        return [
            *super().checks(),
            *self.at_least_one("batch_tokens", "num_steps"),
            *((name, (value := getattr(self, name)) is None or value >= 1, "at least 1") for name in sizes),
            (
                "feature_layers",
                layers is None or (len(layers) > 0 and len(set(layers)) == len(layers) and min(layers) >= 0),
                "different layers, at least one",
            ),
            ("max_len", self.max_len >= 3, "at least 3"),
            ("step_decay", 0 < self.step_decay <= 1, "above 0 and at most 1"),
            ("loss_fraction", 0 < self.loss_fraction <= 1, "above 0 and at most 1"),
            ("gradient_norm", self.gradient_norm > 0, "above 0"),
        ]
