"""Fit a phrase head to recorded answers.

AdamW with warm-up and a cosine to zero; the output bias starts at the log frequencies of the entries; after
every epoch the head drafts on held-out answers (`evaluate.py`), and the epoch with the most tokens per
round is kept. Each epoch leaves a checkpoint, so the same run goes on after an interruption with the
numbers it would have had.
"""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from paceline.drafters.phrase_trees import PhraseTrees, phrase_embeddings
from paceline.errors import CheckpointError
from paceline.heads.phrase import PhraseHead
from paceline.targets.loading import cpu_has_bfloat16
from paceline.training.evaluate import HeadEvaluation, evaluate_head, evaluate_trees
from paceline.training.losses import PhraseLoss
from paceline.training.phrase_learner import PhraseLearner, PhraseScores
from paceline.training.run_folder import write_json
from paceline.training.samples import Samples
from paceline.vocabularies.chains import padded_token_ids
from paceline.vocabularies.trie import TokenTrie

WARM_UP_FRACTION = 0.05
CHOICE_WIDTH = 32
"""Drafted nodes at which epochs are compared."""
CHOICE_ROWS = 12_000
"""Held-out tokens on which they are compared."""


@dataclass(frozen=True, slots=True)
class FitOptions:
    """How to fit; see `phrase_options.PhraseTrainingOptions` for the meaning of the fields."""

    loss: str = "longest"
    epochs: int = 12
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    batch_size: int = 2048
    patience: int = 2
    ema_decay: float = 0.0
    seed: int = 0
    device: str = "auto"


@dataclass(frozen=True, slots=True)
class EpochFigures:
    """One epoch.

    Attributes:
        epoch: counted from 1.
        train_loss: mean over its steps, of first phrases.
        held_out_loss: likewise over held-out rows.
        tokens_per_round: on held-out answers, by number of drafted nodes.
    """

    epoch: int
    train_loss: float
    held_out_loss: float
    tokens_per_round: dict[int, float]


@dataclass(frozen=True, slots=True)
class FitResult:
    """A finished fit.

    Attributes:
        head: with the weights of the best epoch, in fp32 on the CPU, in evaluation mode.
        best_epoch: counted from 1.
        history: all epochs.
    """

    head: PhraseHead
    best_epoch: int
    history: tuple[EpochFigures, ...]


class PhraseFit:
    """Trains one head on one set of samples.

    Args:
        head: to be trained, in place.
        embedding: [V, D], the target's input embeddings, scaled as the target scales them.
        train: training samples.
        held_out: samples of held-out prompts.
        trie: of the head's vocabulary.
        token_ids: tokens of each of its phrases.
        options: how.
        folder: checkpoints; what it holds of the same run is gone on from.
    """

    def __init__(
        self,
        head: PhraseHead,
        embedding: Tensor,
        train: Samples,
        held_out: Samples,
        trie: TokenTrie,
        token_ids: Seq[tuple[int, ...]],
        options: FitOptions,
        folder: Path,
    ) -> None:
        from accelerate import Accelerator

        self.options = options
        self.folder = folder
        self.train, self.held_out, self.trie, self.token_ids = train, held_out, trie, token_ids
        self.loss = PhraseLoss(options.loss, trie)
        self.accelerator: Any = Accelerator(cpu=options.device == "cpu")
        self.device: torch.device = self.accelerator.device
        self.embedding = embedding.to(self.device)
        self.head = head.float()
        self.phrases = self._phrase_embeddings() if head.step is not None else None
        self.optimizer: Any = torch.optim.AdamW(
            _parameter_groups(self.head, options.weight_decay), lr=options.learning_rate, betas=(0.9, 0.98)
        )
        self.model, self.optimizer = self.accelerator.prepare(PhraseLearner(self.head), self.optimizer)
        self.average = {name: tensor.detach().clone() for name, tensor in self.head.state_dict().items()}
        self.steps_per_epoch = max(1, math.ceil(len(train.trained) / options.batch_size))
        self.history: list[EpochFigures] = []
        self.num_steps = 0

    def run(
        self, on_step: Callable[[int], None] | None = None, say: Callable[[str], None] = print
    ) -> FitResult:
        """Train until the epochs are over or patience is.

        Args:
            on_step: told the steps so far, of `options.epochs * steps_per_epoch`.
            say: told a line per epoch.
        """
        self._resume()
        while len(self.history) < self.options.epochs and not self._is_stale():
            train_loss = self._run_epoch(len(self.history), on_step)
            figures = self._evaluate(len(self.history) + 1, train_loss)
            self.history.append(figures)
            self._save(is_best=self._best_epoch() == figures.epoch)
            per_round = ", ".join(
                f"{value:.3f} at {width}" for width, value in figures.tokens_per_round.items()
            )
            say(
                f"epoch {figures.epoch}: loss {figures.train_loss:.4f}, "
                f"held out {figures.held_out_loss:.4f}, tokens per round {per_round}"
            )
        self.head.load_state_dict(load_file(self.folder / "best.safetensors"))
        # A copy: the head itself stays where the held-out rows are, to be evaluated.
        head = copy.deepcopy(self.head).cpu().eval()
        return FitResult(head, self._best_epoch(), tuple(self.history))

    def inputs(self, samples: Samples, rows: Tensor) -> Tensor:
        """[M, num_inputs * D]: what the head reads at rows of `samples`, on the device."""
        states = samples.states(rows).to(self.device)
        newest = self.embedding[samples.newest_ids[rows].to(self.device)]
        layers = self.head.config.feature_layers
        features = {layer: states[:, 1 + i] for i, layer in enumerate(layers)}
        return self.head.join_inputs(states[:, 0], newest.to(states.dtype), features)

    def losses(self, samples: Samples, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss of the first phrases of some rows, and that of everything else that the head learns.

        The second one is of the phrases that follow, and of the ranking; 0 for a head without either.
        """
        entries = samples.entries[rows].to(self.device)
        nodes = samples.nodes[rows].to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=_has_fast_bf16(self.device)):
            phrases = () if self.phrases is None else [table[entries] for table in self.phrases]
            scores: PhraseScores = self.model(self.inputs(samples, rows), *phrases)
        second = scores.ranking_loss
        if scores.chained is not None:
            followers = samples.followers[rows].to(self.device)
            # A sum over none is 0, and no NaN as its mean would be.
            summed = functional.cross_entropy(
                scores.chained.float(), followers, ignore_index=-1, reduction="sum"
            )
            second = second + summed / (followers >= 0).sum().clamp(min=1)
        return self.loss(scores.phrases, entries, nodes), second

    @torch.no_grad()
    def _phrase_embeddings(self) -> tuple[Tensor, Tensor]:
        """[E, D] twice: embedding of each phrase's last token, and the mean of all."""
        padded = padded_token_ids(self.token_ids)
        lengths = torch.tensor([len(ids) for ids in self.token_ids])
        parts = [
            phrase_embeddings(self.embedding[ids.to(self.device)], own.to(self.device))
            for ids, own in zip(torch.split(padded, 1024), torch.split(lengths, 1024), strict=True)
        ]
        dtype = self.embedding.dtype
        return torch.cat([last for last, _ in parts]).to(dtype), torch.cat([mean for _, mean in parts]).to(
            dtype
        )

    def _run_epoch(self, epoch: int, on_step: Callable[[int], None] | None) -> float:
        """One pass; returns the mean loss. Everything random depends on the seed and the epoch alone."""
        generator = torch.Generator().manual_seed(self.options.seed * 1_000_003 + epoch)
        order = self.train.shuffled(generator)
        torch.manual_seed(self.options.seed * 1_000_003 + epoch)
        self.head.train()
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        total = 0.0
        for rows in torch.split(order, self.options.batch_size):
            own = rows[rank::world]
            for group in self.optimizer.param_groups:
                group["lr"] = self.options.learning_rate * self._schedule()
            loss, second = self.losses(self.train, own)
            self.optimizer.zero_grad(set_to_none=True)
            self.accelerator.backward(loss + second)
            self.accelerator.clip_grad_norm_(self.head.parameters(), 1.0)
            self.optimizer.step()
            self._update_average()
            total += float(loss.detach())
            self.num_steps += 1
            if on_step is not None:
                on_step(self.num_steps)
        return total / self.steps_per_epoch

    def _schedule(self) -> float:
        """Fraction of the peak learning rate: linear warm-up, then a cosine to zero."""
        num_total = self.options.epochs * self.steps_per_epoch
        num_warm = max(1, int(WARM_UP_FRACTION * num_total))
        if self.num_steps < num_warm:
            return (self.num_steps + 1) / num_warm
        progress = (self.num_steps - num_warm) / max(1, num_total - num_warm)
        return 0.5 * (1.0 + math.cos(math.pi * progress))

    @torch.no_grad()
    def _update_average(self) -> None:
        """Exponential average of the weights; the last weights themselves without decay."""
        if not self.options.ema_decay:
            return
        # Young averages forget faster: the first weights are random.
        decay = min(self.options.ema_decay, (1 + self.num_steps) / (10 + self.num_steps))
        for name, tensor in self.head.state_dict().items():
            self.average[name].lerp_(tensor.to(self.average[name].device), 1.0 - decay)

    @torch.no_grad()
    def _evaluate(self, epoch: int, train_loss: float) -> EpochFigures:
        """Held-out figures of the averaged weights (which stay in `average`)."""
        current = {name: tensor.detach().clone() for name, tensor in self.head.state_dict().items()}
        if not self.options.ema_decay:
            self.average = current
        self.head.load_state_dict(self.average)
        self.head.eval()
        losses = []
        for rows in torch.split(self.held_out.trained, self.options.batch_size):
            loss, _ = self.losses(self.held_out, rows)
            losses.append(float(loss) * len(rows))
        evaluation = self.evaluate(max_rows=CHOICE_ROWS)
        self.head.load_state_dict(current)
        held_out_loss = sum(losses) / max(1, len(self.held_out.trained))
        return EpochFigures(epoch, train_loss, held_out_loss, evaluation.tokens_per_round)

    @torch.no_grad()
    def evaluate(self, max_rows: int | None = None) -> HeadEvaluation:
        """Draft on the held-out answers (about `max_rows` tokens of them) with the head as it is."""
        self.head.eval()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=_has_fast_bf16(self.device)):
            if self.phrases is None and self.head.ranking is None:
                return evaluate_head(
                    lambda rows: self.head(self.inputs(self.held_out, rows)).cpu(),
                    self.held_out,
                    self.trie,
                    max_rows=max_rows,
                )
            trees = PhraseTrees(self.head, self.trie, self.token_ids, lambda ids: self.embedding[ids])
            return evaluate_trees(
                lambda rows, width: trees.draft(
                    self.inputs(self.held_out, rows), self.held_out.newest_ids[rows].tolist(), width
                ),
                self.held_out,
                max_rows=max_rows,
            )

    def _best_epoch(self) -> int:
        """Epoch with the most tokens per round."""
        return max(self.history, key=lambda figures: figures.tokens_per_round[CHOICE_WIDTH]).epoch

    def _is_stale(self) -> bool:
        """Whether the best epoch is `patience` epochs ago."""
        return bool(self.history) and len(self.history) - self._best_epoch() >= self.options.patience

    def _save(self, *, is_best: bool) -> None:
        """Write the checkpoint of the last epoch, and the averaged weights when they are the best so far."""
        if not self.accelerator.is_main_process:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if is_best:
            partial = self.folder / "best.partial"
            save_file({name: tensor.contiguous().cpu() for name, tensor in self.average.items()}, partial)
            os.replace(partial, self.folder / "best.safetensors")
        partial = self.folder / "checkpoint.partial"
        torch.save(
            {
                "head": self.head.state_dict(),
                "average": self.average,
                "optimizer": self.optimizer.state_dict(),
                "num_steps": self.num_steps,
                "history": json.dumps([asdict(figures) for figures in self.history]),
            },
            partial,
        )
        os.replace(partial, self.folder / "checkpoint.pt")
        write_json(self.folder / "history.json", [asdict(figures) for figures in self.history])

    def _resume(self) -> None:
        """Go on from the last checkpoint in the folder, if there is one."""
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
            self.head.load_state_dict(state["head"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError, KeyError, OSError) as error:
            raise CheckpointError(
                f"{path} cannot be gone on from ({error}): delete it to fit again"
            ) from None
        self.average = state["average"]
        self.num_steps = state["num_steps"]
        self.history = [
            EpochFigures(
                row["epoch"],
                row["train_loss"],
                row["held_out_loss"],
                {int(width): value for width, value in row["tokens_per_round"].items()},
            )
            for row in json.loads(state["history"])
        ]


def start_from_frequencies(head: PhraseHead, entries: Tensor) -> None:
    """Set the output bias to the log frequencies of the entries, so that training starts from the prior.

    Args:
        head: changed in place.
        entries: int64, longest entries of the training samples.
    """
    counts = torch.bincount(entries, minlength=head.config.num_entries).float() + 0.5
    with torch.no_grad():
        head.output.bias.copy_((counts / counts.sum()).log())


def _parameter_groups(head: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; biases and norms do not."""
    matrices = [p for p in head.parameters() if p.dim() > 1]
    others = [p for p in head.parameters() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def _has_fast_bf16(device: torch.device) -> bool:
    """Whether matrix products are faster in bf16 there."""
    if device.type == "cpu":
        return cpu_has_bfloat16()
    return device.type == "cuda" and torch.cuda.is_bf16_supported()
