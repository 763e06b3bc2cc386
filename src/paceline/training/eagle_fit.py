"""Fit an EAGLE head: training-time test, soft cross-entropy against the frozen target, online features.

Per step of the unrolled head the loss is the cross-entropy between the target's distribution and the head's
own over the vocabulary in use, weighted 0.8^i; a speculated vocabulary adds the same of its ranking, which
counts a tenth. The target reads every text once per epoch; nothing is recorded but the texts.

A static vocabulary that is trained (as EAGLE-3's authors do) has rows of its own that learn too; positions
whose token it does not hold are left out.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from paceline.errors import CheckpointError
from paceline.heads.eagle import EagleHead
from paceline.targets.base import TargetModel
from paceline.training.allocator import release_free_pages
from paceline.training.capture import Conversation
from paceline.training.eagle_batch import EagleBatch, build_batch
from paceline.training.eagle_states import OnlineStates, StateSource
from paceline.training.eagle_teacher import EagleOutputs, EagleTeacher, StepLoss
from paceline.training.eagle_texts import batches
from paceline.training.unrolled import DEFAULT_STEPS, STEP_DECAY, unroll
from paceline.vocabularies.output_layer import OutputLayer
from paceline.vocabularies.speculative import VocabularyRanking

RANKING_SHARE = 0.1
"""What the loss of the ranking counts beside the head's, as published."""
WARM_UP_FRACTION = 0.015
CHECKPOINT = "checkpoint.pt"
SAVE_SECONDS = 120.0
"""How much work an interruption may cost; free memory is given back as often."""


@dataclass(frozen=True, slots=True)
class EagleFitOptions:
    """How to fit.

    Attributes:
        epochs: passes over the texts.
        learning_rate: peak of AdamW.
        batch_tokens: tokens of a step, padding included.
        num_steps: steps of the training-time test.
        step_decay: what a step counts, to the power of its number.
        loss_fraction: share of the positions that the loss is taken at, drawn anew for every batch; all steps
            share them, so that the target's distribution is computed there alone.
        gradient_norm: at which gradients are clipped.
        seed: of the order of the texts, and of those positions.
    """

    epochs: int = 3
    learning_rate: float = 1e-3
    batch_tokens: int = 2048
    num_steps: int = DEFAULT_STEPS
    step_decay: float = STEP_DECAY
    loss_fraction: float = 1.0
    gradient_norm: float = 0.5
    seed: int = 0


@dataclass(frozen=True, slots=True)
class EagleFigures:
    """One epoch.

    Attributes:
        epoch: counted from 1.
        train_loss: mean per learned token, summed over the steps.
        held_out_loss: likewise on held-out texts.
        agreement: per step, share of held-out positions whose likeliest token is the target's.
        acceptance_length: tokens a round of a chain of so many drafted tokens, if steps erred independently.
        coverage: share of positions whose token the ranking puts among 2,048; None without a ranking.
    """

    epoch: int
    train_loss: float
    held_out_loss: float
    agreement: tuple[float, ...]
    acceptance_length: float
    coverage: float | None


@dataclass(slots=True)
class _Tally:
    """Of the epoch at hand: steps done, loss so far, and tokens that it is of."""

    num_steps: int = 0
    loss: float = 0.0
    num_tokens: int = 0


class EagleFit:
    """Trains one head on one set of texts.

    Args:
        head: in place.
        target: frozen.
        layer: output layer of the whole vocabulary, frozen.
        train: texts.
        held_out: texts that are kept apart.
        options: how.
        folder: checkpoints; what it holds of the same run is gone on from.
        ranking: trained beside the head.
        own_rows: a reduced output layer that learns.
        own_ids: int64 [S], what its rows mean.
        states: where the target's states come from; by default the target reads the texts in every epoch.
    """

    def __init__(
        self,
        head: EagleHead,
        target: TargetModel,
        layer: OutputLayer,
        train: Seq[Conversation],
        held_out: Seq[Conversation],
        options: EagleFitOptions,
        folder: Path,
        *,
        ranking: VocabularyRanking | None = None,
        own_rows: nn.Linear | None = None,
        own_ids: Tensor | None = None,
        states: StateSource | None = None,
    ) -> None:
        self.head, self.target, self.ranking = head.float(), target, ranking
        self.train, self.held_out, self.options, self.folder = train, held_out, options, folder
        self.outputs = EagleOutputs(layer, ranking, own_rows, own_ids)
        self.states = states or OnlineStates(target, head.config.feature_layers)
        self.modules = nn.ModuleDict({"head": head})
        if ranking is not None:
            self.modules["ranking"] = ranking
        if own_rows is not None:
            self.modules["rows"] = own_rows
        self.optimizer = torch.optim.AdamW(
            self.modules.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.history: list[EagleFigures] = []
        self.num_steps = 0
        self._tally = _Tally()
        # Epochs differ by a step or two: how many texts share one depends on how they are shuffled.
        self.total_steps = sum(len(self._groups(epoch)) for epoch in range(options.epochs))

    def run(
        self, on_step: Callable[[int], None] | None = None, say: Callable[[str], None] = print
    ) -> list[EagleFigures]:
        """Train for the epochs that are left.

        Args:
            on_step: told the steps so far, of `total_steps`.
            say: told a line per epoch.
        """
        self._resume()
        while len(self.history) < self.options.epochs:
            train_loss = self._run_epoch(len(self.history), on_step)
            figures = self._evaluate(len(self.history) + 1, train_loss)
            self.history.append(figures)
            self._save()
            steps = ", ".join(f"{share:.1%}" for share in figures.agreement)
            say(
                f"epoch {figures.epoch}: loss {figures.train_loss:.3f}, held out "
                f"{figures.held_out_loss:.3f}, agreement {steps}, a chain of them yields "
                f"{figures.acceptance_length:.2f} tokens a round"
            )
        return self.history

    def write_weights(self, path: Path) -> None:
        """The weights as they are now: `head.*`, `ranking.*`, `rows.*` and `row_ids`, as safetensors."""
        tensors = {n: t.detach().cpu().contiguous() for n, t in self.modules.state_dict().items()}
        if self.outputs.own_ids is not None:
            tensors["row_ids"] = self.outputs.own_ids.cpu()
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        save_file(tensors, partial)
        partial.replace(path)

    def losses(self, batch: EagleBatch) -> Iterator[StepLoss]:
        """Loss and agreement of every step of a batch."""
        width = batch.embedding.shape[1]
        features = batch.features.to(self.head.dtype)
        embedding = batch.embedding.to(self.head.dtype)
        place = torch.arange(width, device=embedding.device)
        learned = batch.is_learned
        if torch.is_grad_enabled() and self.options.loss_fraction < 1:
            learned = learned & self._drawn(learned)
        teacher = EagleTeacher(self.outputs, batch.teacher, learned)
        for step, states in enumerate(
            unroll(
                self.head,
                embedding,
                features,
                self.options.num_steps,
                batch.lengths,
                dtype=self.outputs.product_dtype,
            )
        ):
            chosen = (teacher.is_taught & (place >= step)).flatten()
            yield teacher.step_loss(states.final.flatten(0, 1)[chosen], chosen)

    def _drawn(self, positions: Tensor) -> Tensor:
        """Bool, shaped like `positions`: where the loss is taken; depends on the seed and the step alone."""
        generator = torch.Generator().manual_seed(self.options.seed * 1_000_003 + self.num_steps)
        drawn = torch.rand(positions.shape, generator=generator) < self.options.loss_fraction
        return drawn.to(positions.device)

    def _run_epoch(self, epoch: int, on_step: Callable[[int], None] | None) -> float:
        """One pass; returns the mean loss. The order depends on the seed and the epoch alone."""
        self.modules.train()
        tally, saved = self._tally, time.monotonic()
        for group in self._groups(epoch)[tally.num_steps :]:
            batch = self._batch([self.train[i] for i in group])
            for parameters in self.optimizer.param_groups:
                parameters["lr"] = self.options.learning_rate * self._schedule()
            self.optimizer.zero_grad(set_to_none=True)
            loss = torch.zeros((), device=self.target.device)
            learned = 0
            for step, found in enumerate(self.losses(batch)):
                learned = max(learned, found.num_tokens)
                weight = self.options.step_decay**step
                loss = loss + weight * (found.loss + RANKING_SHARE * found.ranking_loss)
                tally.loss += float(found.loss.detach())
            if learned:
                torch.autograd.backward(loss / learned)
                nn.utils.clip_grad_norm_(self.modules.parameters(), self.options.gradient_norm)
                self.optimizer.step()
            tally.num_tokens += learned
            tally.num_steps += 1
            self.num_steps += 1
            if time.monotonic() - saved > SAVE_SECONDS:
                self._save()
                release_free_pages()
                saved = time.monotonic()
            if on_step is not None:
                on_step(self.num_steps)
        self._tally = _Tally()
        return tally.loss / max(tally.num_tokens, 1)

    @torch.no_grad()
    def _evaluate(self, epoch: int, train_loss: float) -> EagleFigures:
        """Losses and agreement on the held-out texts."""
        self.modules.eval()
        steps = range(self.options.num_steps)
        losses, agreed, counted, covered = ([0.0 for _ in steps] for _ in range(4))
        for group in batches(self.held_out, self.options.batch_tokens, None):
            batch = self._batch([self.held_out[i] for i in group])
            for step, found in enumerate(self.losses(batch)):
                losses[step] += float(found.loss)
                agreed[step] += found.num_agreed
                counted[step] += found.num_tokens
                covered[step] += found.num_covered
        agreement = tuple(a / max(n, 1) for a, n in zip(agreed, counted, strict=True))
        chance, length = 1.0, 1.0
        for share in agreement:
            chance *= share
            length += chance
        return EagleFigures(
            epoch,
            train_loss,
            sum(loss / max(n, 1) for loss, n in zip(losses, counted, strict=True)),
            agreement,
            length,
            None if self.ranking is None else sum(covered) / max(sum(counted), 1),
        )

    def _batch(self, texts: Seq[Conversation]) -> EagleBatch:
        """What one step learns from."""
        reads_final_state = not self.head.config.feature_layers
        return build_batch(self.target, texts, self.states.states(texts), reads_final_state=reads_final_state)

    def _groups(self, epoch: int) -> list[list[int]]:
        """The steps of one epoch."""
        generator = torch.Generator().manual_seed(self.options.seed * 1_000_003 + epoch)
        return batches(self.train, self.options.batch_tokens, generator)

    def _schedule(self) -> float:
        """Fraction of the peak learning rate: linear warm-up, then a cosine to zero."""
        num_total = self.total_steps
        num_warm = max(1, int(WARM_UP_FRACTION * num_total))
        if self.num_steps < num_warm:
            return (self.num_steps + 1) / num_warm
        progress = min(1.0, (self.num_steps - num_warm) / max(1, num_total - num_warm))
        return 0.5 * (1.0 + math.cos(math.pi * progress))

    def _save(self) -> None:
        """Everything that the fit needs to go on, in one file that is whole or the one before."""
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / "checkpoint.partial"
        torch.save(
            {
                "key": self._key(),
                "modules": self.modules.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "num_steps": self.num_steps,
                "tally": asdict(self._tally),
                "history": [asdict(figures) for figures in self.history],
            },
            partial,
        )
        partial.replace(self.folder / CHECKPOINT)

    def _resume(self) -> None:
        """Go on behind the last step that was saved."""
        path = self.folder / CHECKPOINT
        if self.num_steps or not path.is_file():
            return
        try:
            stored: dict[str, Any] = torch.load(path, weights_only=True, map_location=self.target.device)
            is_same = stored["key"] == self._key()
            if is_same:
                self.modules.load_state_dict(stored["modules"])
                self.optimizer.load_state_dict(stored["optimizer"])
                self.num_steps, self._tally = stored["num_steps"], _Tally(**stored["tally"])
                self.history = [EagleFigures(**row) for row in stored["history"]]
        except (OSError, EOFError, ValueError, TypeError, RuntimeError, KeyError, UnpicklingError) as error:
            raise CheckpointError(
                f"{self.folder} holds a fit that cannot be gone on from ({error}): delete it to start anew"
            ) from error
        if not is_same:
            raise CheckpointError(
                f"{self.folder} holds a fit of other texts or options: choose another folder, or delete it"
            )

    def _key(self) -> str:
        """What two runs must share for one to go on from the other."""
        digest = hashlib.sha256(repr((asdict(self.options), asdict(self.head.config))).encode())
        for text in (*self.train, *self.held_out):
            digest.update(text.token_ids.numpy().tobytes())
        return digest.hexdigest()[:16]
