"""Fit an EAGLE head: training-time test, soft cross-entropy against the frozen target, online features.

Per step of the unrolled head the loss is the cross-entropy between the target's distribution and the head's
own over the vocabulary in use, weighted 0.8^i; a speculated vocabulary adds the same of its ranking, which
counts a tenth. The target reads every text once per epoch; nothing is recorded but the texts.

A static vocabulary that is trained (as EAGLE-3's authors do) has rows of its own that learn too; positions
whose token it does not hold are left out.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline.errors import CheckpointError
from paceline.heads.eagle import EagleHead
from paceline.targets.base import TargetModel
from paceline.targets.loading import cpu_has_bfloat16
from paceline.training.capture import Conversation
from paceline.training.eagle_batch import EagleBatch, build_batch
from paceline.training.eagle_texts import batches
from paceline.training.soft_cross_entropy import Finish, soft_cross_entropy
from paceline.training.unrolled import DEFAULT_STEPS, STEP_DECAY, unroll
from paceline.vocabularies.output_layer import OutputLayer
from paceline.vocabularies.speculative import DEFAULT_NUM_CANDIDATES, VocabularyRanking

RANKING_SHARE = 0.1
"""What the loss of the ranking counts beside the head's, as published."""
WARM_UP_FRACTION = 0.015


@dataclass(frozen=True, slots=True)
class EagleFitOptions:
    """How to fit.

    Attributes:
        epochs: passes over the texts.
        learning_rate: peak of AdamW.
        batch_tokens: tokens of a step, padding included.
        num_steps: steps of the training-time test.
        step_decay: what a step counts, to the power of its number.
        gradient_norm: at which gradients are clipped.
        seed: of the order of the texts.
    """

    epochs: int = 3
    learning_rate: float = 1e-3
    batch_tokens: int = 2048
    num_steps: int = DEFAULT_STEPS
    step_decay: float = STEP_DECAY
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
    ) -> None:
        self.head, self.target, self.layer = head.float(), target, layer
        self.train, self.held_out, self.options, self.folder = train, held_out, options, folder
        self.ranking, self.own_rows, self.own_ids = ranking, own_rows, own_ids
        self.frozen_rows = _working(layer.weight)
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
        self.steps_per_epoch = len(self._groups(0))

    def run(
        self, on_step: Callable[[int], None] | None = None, say: Callable[[str], None] = print
    ) -> list[EagleFigures]:
        """Train for the epochs that are left.

        Args:
            on_step: told the steps so far, of `options.epochs * steps_per_epoch`.
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

    def losses(self, batch: EagleBatch) -> Iterator[StepLoss]:
        """Loss and agreement of every step of a batch."""
        width = batch.embedding.shape[1]
        features = batch.features.to(self.head.dtype)
        embedding = batch.embedding.to(self.head.dtype)
        place = torch.arange(width, device=embedding.device)
        teacher = _Teacher(self, batch)
        for step, states in enumerate(
            unroll(self.head, embedding, features, self.options.num_steps, batch.lengths)
        ):
            chosen = (batch.is_learned & teacher.is_held & (place >= step)).flatten()
            yield teacher.step_loss(states.final.flatten(0, 1)[chosen], chosen)

    def _run_epoch(self, epoch: int, on_step: Callable[[int], None] | None) -> float:
        """One pass; returns the mean loss. The order depends on the seed and the epoch alone."""
        self.modules.train()
        total, num_tokens = 0.0, 0
        for group in self._groups(epoch):
            batch = build_batch(self.target, [self.train[i] for i in group], self.head.config.feature_layers)
            for parameters in self.optimizer.param_groups:
                parameters["lr"] = self.options.learning_rate * self._schedule()
            self.optimizer.zero_grad(set_to_none=True)
            loss = torch.zeros((), device=self.target.device)
            learned = 0
            for step, found in enumerate(self.losses(batch)):
                learned = max(learned, found.num_tokens)
                weight = self.options.step_decay**step
                loss = loss + weight * (found.loss + RANKING_SHARE * found.ranking_loss)
                total += float(found.loss.detach())
            if learned:
                torch.autograd.backward(loss / learned)
                nn.utils.clip_grad_norm_(self.modules.parameters(), self.options.gradient_norm)
                self.optimizer.step()
            num_tokens += learned
            self.num_steps += 1
            if on_step is not None:
                on_step(self.num_steps)
        return total / max(num_tokens, 1)

    @torch.no_grad()
    def _evaluate(self, epoch: int, train_loss: float) -> EagleFigures:
        """Losses and agreement on the held-out texts."""
        self.modules.eval()
        steps = range(self.options.num_steps)
        losses, agreed, counted, covered = ([0.0 for _ in steps] for _ in range(4))
        for group in batches(self.held_out, self.options.batch_tokens, None):
            batch = build_batch(
                self.target, [self.held_out[i] for i in group], self.head.config.feature_layers
            )
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

    def _groups(self, epoch: int) -> list[list[int]]:
        """The steps of one epoch."""
        generator = torch.Generator().manual_seed(self.options.seed * 1_000_003 + epoch)
        return batches(self.train, self.options.batch_tokens, generator)

    def _schedule(self) -> float:
        """Fraction of the peak learning rate: linear warm-up, then a cosine to zero."""
        num_total = self.options.epochs * self.steps_per_epoch
        num_warm = max(1, int(WARM_UP_FRACTION * num_total))
        if self.num_steps < num_warm:
            return (self.num_steps + 1) / num_warm
        progress = min(1.0, (self.num_steps - num_warm) / max(1, num_total - num_warm))
        return 0.5 * (1.0 + math.cos(math.pi * progress))

    def _save(self) -> None:
        """Weights, optimiser and history of finished epochs, each file whole or not there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        number = len(self.history)
        weights = self.folder / f"epoch-{number}.safetensors"
        partial = weights.with_suffix(".partial")
        save_file({n: t.detach().cpu().contiguous() for n, t in self.modules.state_dict().items()}, partial)
        partial.replace(weights)
        state = self.folder / f"epoch-{number}.pt"
        partial = state.with_suffix(".partial")
        progress = {"optimizer": self.optimizer.state_dict(), "num_steps": self.num_steps, "key": self._key()}
        torch.save(progress, partial)
        partial.replace(state)
        history = self.folder / "history.json"
        partial = history.with_suffix(".partial")
        partial.write_text(json.dumps([asdict(f) for f in self.history], indent=1) + "\n", encoding="utf-8")
        partial.replace(history)
        # Only now is the epoch before dispensable.
        for old in (self.folder / f"epoch-{number - 1}.safetensors", self.folder / f"epoch-{number - 1}.pt"):
            old.unlink(missing_ok=True)

    def _resume(self) -> None:
        """Go on behind the last epoch whose files are whole."""
        path = self.folder / "history.json"
        if self.history or not path.is_file():
            return
        try:
            stored: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))
            self.history = [EagleFigures(**{**row, "agreement": tuple(row["agreement"])}) for row in stored]
            number = len(self.history)
            weights = load_file(self.folder / f"epoch-{number}.safetensors")
            self.modules.load_state_dict(weights)
            progress = torch.load(self.folder / f"epoch-{number}.pt", weights_only=True)
            self.optimizer.load_state_dict(progress["optimizer"])
            self.num_steps = progress["num_steps"]
        except (OSError, ValueError, TypeError, RuntimeError, KeyError, SafetensorError) as error:
            raise CheckpointError(
                f"{self.folder} holds a fit that cannot be gone on from ({error}): delete it to start anew"
            ) from error
        if progress["key"] != self._key():
            raise CheckpointError(
                f"{self.folder} holds a fit of other texts or options: choose another folder, or delete it"
            )

    def _key(self) -> str:
        """What two runs must share for one to go on from the other."""
        digest = hashlib.sha256(repr((asdict(self.options), asdict(self.head.config))).encode())
        for text in (*self.train, *self.held_out):
            digest.update(text.token_ids.numpy().tobytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class StepLoss:
    """One step of one batch.

    Attributes:
        loss: fp32 scalar, summed over positions.
        ranking_loss: likewise of the ranking; 0 without one.
        num_tokens: positions.
        num_agreed: those whose likeliest token is the target's; 0 while training.
        num_covered: those whose token the ranking puts among the first 2,048; 0 while training.
    """

    loss: Tensor
    ranking_loss: Tensor
    num_tokens: int
    num_agreed: int = 0
    num_covered: int = 0


class _Teacher:
    """The target's distributions of one batch, over the vocabulary in use.

    Args:
        fit: whose vocabulary it is.
        batch: texts.
    """

    def __init__(self, fit: EagleFit, batch: EagleBatch) -> None:
        self._fit = fit
        learned = batch.is_learned.flatten()
        with torch.no_grad():
            states = batch.teacher.to(fit.layer.weight.dtype).flatten(0, 1)[learned]
            logits = fit.layer.all_logits(states)
        # Before rounding: in bf16 near-ties would become ties.
        choices = logits.argmax(-1)
        logits = logits.to(torch.bfloat16)
        held = torch.ones_like(learned)
        if fit.own_ids is not None:
            logits = logits[:, fit.own_ids]
            held[learned] = torch.isin(choices, fit.own_ids)
        self.is_held = held.view_as(batch.is_learned)
        # Number among the learned positions of every position of the batch.
        self._numbers = learned.cumsum(0) - 1
        self._logits, self._choices = logits, choices

    def step_loss(self, states: Tensor, chosen: Tensor) -> StepLoss:
        """Loss of some positions.

        Args:
            states: [N, D], final ones of the head.
            chosen: bool [B * T], which positions they are.
        """
        fit, rows = self._fit, self._numbers[chosen]
        teacher, shares = self._logits[rows], torch.ones(len(rows), device=states.device)
        if fit.own_rows is not None:
            loss = soft_cross_entropy(states, fit.own_rows.weight, teacher, shares, bias=fit.own_rows.bias)
        else:
            finish = Finish(fit.layer.scale, fit.layer.soft_cap)
            loss = soft_cross_entropy(
                states, fit.frozen_rows, teacher, shares, bias=fit.layer.bias, finish=finish
            )
        ranking_loss = torch.zeros((), device=states.device)
        if fit.ranking is not None:
            narrow = fit.ranking.down(states.detach())
            ranking_loss = soft_cross_entropy(narrow, fit.ranking.vocabulary.weight, teacher, shares)
        if torch.is_grad_enabled():
            return StepLoss(loss, ranking_loss, len(rows))
        return StepLoss(loss, ranking_loss, len(rows), *self._counts(states, rows))

    def _counts(self, states: Tensor, rows: Tensor) -> tuple[int, int]:
        """Positions at which the head agrees with the target, and those that the ranking covers."""
        fit, wanted = self._fit, self._choices[rows]
        agreed = covered = 0
        for part, ids in zip(torch.split(states, 256), torch.split(wanted, 256), strict=True):
            if fit.own_rows is not None and fit.own_ids is not None:
                guesses = fit.own_ids[fit.own_rows(part).argmax(-1)]
            else:
                guesses = fit.layer.all_logits(part.to(fit.layer.weight.dtype)).argmax(-1)
            agreed += int((guesses == ids).sum())
            if fit.ranking is not None:
                ranked = fit.ranking(part)
                better = (ranked > ranked.gather(1, ids[:, None])).sum(-1)
                covered += int((better < DEFAULT_NUM_CANDIDATES).sum())
        return agreed, covered


def _working(weight: Tensor) -> Tensor:
    """The frozen output layer in the dtype that this machine multiplies fastest."""
    if weight.device.type == "cpu" and weight.dtype is torch.float32 and cpu_has_bfloat16():
        return weight.to(torch.bfloat16)
    return weight
