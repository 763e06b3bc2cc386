"""What the frozen target says about a batch, and how far an EAGLE head's states agree with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.targets.loading import cpu_has_bfloat16
from paceline.training.soft_cross_entropy import CHUNK, Finish, soft_cross_entropy
from paceline.vocabularies.output_layer import OutputLayer
from paceline.vocabularies.speculative import DEFAULT_NUM_CANDIDATES, VocabularyRanking


class EagleOutputs:
    """What the states of a head in training are scored with.

    Args:
        layer: output layer of the whole vocabulary, frozen.
        ranking: trained beside the head.
        own_rows: a reduced output layer that learns; it takes the place of the whole one.
        own_ids: int64 [S], what its rows mean.
    """

    def __init__(
        self,
        layer: OutputLayer,
        ranking: VocabularyRanking | None = None,
        own_rows: nn.Linear | None = None,
        own_ids: Tensor | None = None,
    ) -> None:
        self.layer, self.ranking = layer, ranking
        self.own_rows, self.own_ids = own_rows, own_ids
        self.dtype = _working_dtype(layer.weight)
        self.frozen_rows = layer.weight.to(self.dtype)

    @property
    def product_dtype(self) -> torch.dtype | None:
        """Of the head's own products: bfloat16 where the output layer's are; its range needs no scaling."""
        return torch.bfloat16 if self.dtype is torch.bfloat16 else None


@dataclass(frozen=True, slots=True)
class StepLoss:
    """One step of one batch.

    Attributes:
        loss: fp32 scalar, summed over positions.
        ranking_loss: likewise of the ranking; 0 without one.
        num_tokens: positions that it is taken at.
        num_agreed: those whose likeliest token is the target's; 0 while training.
        num_covered: those whose token the ranking puts among the first 2,048; 0 while training.
    """

    loss: Tensor
    ranking_loss: Tensor
    num_tokens: int
    num_agreed: int = 0
    num_covered: int = 0


class EagleTeacher:
    """The target's distributions at some positions of a batch, over the vocabulary in use.

    Args:
        outputs: what the head's states are scored with.
        final_states: [B, T, D], the target's, whose logits are what the head should say.
        positions: bool [B, T], where that is wanted.

    Attributes:
        is_taught: bool [B, T], those positions without the ones whose token the vocabulary does not hold.
    """

    def __init__(self, outputs: EagleOutputs, final_states: Tensor, positions: Tensor) -> None:
        self._outputs = outputs
        learned = positions.flatten()
        states = final_states.flatten(0, 1)[learned].to(outputs.layer.weight.dtype)
        ids = outputs.own_ids
        num_entries = outputs.layer.num_entries if ids is None else len(ids)
        choices = torch.empty(len(states), dtype=torch.int64, device=states.device)
        logits = torch.empty(len(states), num_entries, dtype=torch.bfloat16, device=states.device)
        with torch.no_grad():
            # In parts: in fp32 all rows at once would take gigabytes.
            for rows in torch.split(torch.arange(len(states), device=states.device), CHUNK):
                part = outputs.layer.all_logits(states[rows])
                # Before rounding: in bf16 near-ties would become ties.
                choices[rows] = part.argmax(-1)
                logits[rows] = (part if ids is None else part[:, ids]).to(torch.bfloat16)
        taught = learned.clone()
        if ids is not None:
            taught[learned] = torch.isin(choices, ids)
        self.is_taught = taught.view_as(positions)
        # Number among the wanted positions of every position of the batch.
        self._numbers = learned.cumsum(0) - 1
        self._logits, self._choices = logits, choices

    def step_loss(self, states: Tensor, chosen: Tensor) -> StepLoss:
        """Loss of some positions.

        Args:
            states: [N, D], final ones of the head.
            chosen: bool [B * T], which positions they are.
        """
        outputs, rows = self._outputs, self._numbers[chosen]
        if outputs.own_rows is not None:
            own = outputs.own_rows
            loss = soft_cross_entropy(
                states, own.weight, self._logits, rows, bias=own.bias, dtype=outputs.dtype
            )
        else:
            finish = Finish(outputs.layer.scale, outputs.layer.soft_cap)
            loss = soft_cross_entropy(
                states, outputs.frozen_rows, self._logits, rows, bias=outputs.layer.bias, finish=finish
            )
        ranking_loss = torch.zeros((), device=states.device)
        if outputs.ranking is not None:
            narrow, wide = outputs.ranking.down(states.detach()), outputs.ranking.vocabulary.weight
            ranking_loss = soft_cross_entropy(
                narrow, wide, self._logits, rows, bias=outputs.layer.scaled_bias, dtype=outputs.dtype
            )
        if torch.is_grad_enabled():
            return StepLoss(loss, ranking_loss, len(rows))
        return StepLoss(loss, ranking_loss, len(rows), *self._counts(states, rows))

    def _counts(self, states: Tensor, rows: Tensor) -> tuple[int, int]:
        """Positions at which the head agrees with the target, and those that the ranking covers."""
        outputs, wanted = self._outputs, self._choices[rows]
        agreed = covered = 0
        for part, ids in zip(torch.split(states, CHUNK), torch.split(wanted, CHUNK), strict=True):
            if outputs.own_rows is not None and outputs.own_ids is not None:
                guesses = outputs.own_ids[outputs.own_rows(part).argmax(-1)]
            else:
                guesses = outputs.layer.all_logits(part.to(outputs.layer.weight.dtype)).argmax(-1)
            agreed += int((guesses == ids).sum())
            if outputs.ranking is not None:
                ranked = outputs.ranking(part)
                if outputs.layer.scaled_bias is not None:
                    ranked = ranked + outputs.layer.scaled_bias
                better = (ranked > ranked.gather(1, ids[:, None])).sum(-1)
                covered += int((better < DEFAULT_NUM_CANDIDATES).sum())
        return agreed, covered


def _working_dtype(weight: Tensor) -> torch.dtype:
    """Of products with output layers: what this machine multiplies fastest."""
    if weight.device.type == "cpu" and weight.dtype is torch.float32 and cpu_has_bfloat16():
        return torch.bfloat16
    return weight.dtype
