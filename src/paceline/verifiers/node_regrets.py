"""What every node of a batch of draft trees would cost: its regret at the position where it was drafted."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.kernels.selection import argmax_rows, logits_at
from paceline.sequence import Sequence
from paceline.transfers import upload
from paceline.verifiers.draft_forest import DraftForest


@dataclass(frozen=True, slots=True)
class NodeRegrets:
    """Figures of R nodes; roots count as the target's choice.

    Attributes:
        choices: int64 [R], the target's argmax *after* each node.
        is_choice: bool [R], whether the node's token is the argmax of its parent's row.
        regrets: float64 [R], largest logit of the parent's row minus the node's own; not finite for banned
            tokens.
        guards_end: bool [R], whether the node's token or the argmax in its place ends the text of its
            sequence.
    """

    choices: NDArray[np.int64]
    is_choice: NDArray[np.bool_]
    regrets: NDArray[np.float64]
    guards_end: NDArray[np.bool_]

    @classmethod
    def of(cls, forest: DraftForest, logits: Tensor, sequences: Seq[Sequence]) -> NodeRegrets:
        """Read the logits; the one synchronisation of a round.

        Args:
            forest: of the trees.
            logits: [R, V], processed, of all nodes; not modified.
            sequences: whose trees they are.
        """
        choices, logits_of = _read(logits, forest.parents, forest.token_ids)
        replaced = choices[forest.parents]
        is_choice = replaced == forest.token_ids
        is_choice[forest.roots] = True
        with np.errstate(invalid="ignore"):
            regrets = np.maximum(logits_of[0] - logits_of[1], 0.0)
        regrets[forest.roots] = 0.0
        return cls(choices, is_choice, regrets, _guards_end(forest, replaced, sequences))


def _read(
    logits: Tensor, parents: NDArray[np.int64], token_ids: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Argmax of each of R rows, and per node the largest logit of its parent's row and its own.

    Returns:
        int64 [R], float64 [2, R].
    """
    chosen = argmax_rows(logits)
    if logits.device.type == "cpu":
        choices = chosen.numpy()
        return choices, logits_at(logits, parents, np.stack([choices[parents], token_ids]))
    rows, ids = upload(torch.from_numpy(np.stack([parents, token_ids])), logits.device).unbind()
    best = logits.gather(1, chosen[:, None])[:, 0][rows]
    # Ids below 2^24 and logits of any dtype are exact in fp32, so that one transfer takes them all.
    fetched = torch.stack([chosen.float(), best.float(), logits[rows, ids].float()]).cpu().numpy()
    return fetched[0].astype(np.int64), fetched[1:].astype(np.float64)


def _guards_end(
    forest: DraftForest, replaced: NDArray[np.int64], sequences: Seq[Sequence]
) -> NDArray[np.bool_]:
    """Where the end of the text is at stake: the token or the one that it would replace ends its sequence."""
    either = np.stack([forest.token_ids, replaced])
    guards = np.zeros(either.shape, dtype=np.bool_)
    for sequence, rows in zip(sequences, forest.slices, strict=True):
        if not sequence.parameters.ignore_eos:
            for eos in sequence.eos_token_ids:
                guards[:, rows] |= either[:, rows] == eos
    guarded: NDArray[np.bool_] = np.logical_or(guards[0], guards[1])
    return guarded
