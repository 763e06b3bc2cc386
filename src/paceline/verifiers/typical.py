"""Typical acceptance, as in Medusa (arXiv 2401.10774); a control for budgeted verification.

A drafted token is kept when the target's probability of it, at temperature 1, exceeds
min(epsilon, delta * exp(-entropy)) at its position: what is possible at all is enough where the target itself
is undecided. Lossy, and nothing bounds what a request loses.

It takes a softmax over the whole vocabulary of every row behind which something was drafted, and on CUDA it
waits for the device once more: its time in the verifier is not that of the others.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from paceline.sequence import Sequence
from paceline.transfers import upload
from paceline.verifiers.draft_forest import DraftForest, Paths
from paceline.verifiers.node_regrets import NodeRegrets
from paceline.verifiers.relaxed import Judgement, RelaxedVerifier


class TypicalVerifier(RelaxedVerifier):
    """Keeps what the target finds typical in its place."""

    name: ClassVar[str] = "typical"
    limits: ClassVar[tuple[str, ...]] = ("typical_epsilon", "typical_delta")

    def judge(
        self,
        forest: DraftForest,
        scores: NodeRegrets,  # noqa: ARG002
        paths: Paths,  # noqa: ARG002
        logits: Tensor,
        sequences: Seq[Sequence],
    ) -> Judgement:
        """Nodes that are not typical."""
        limits = [sequence.parameters.relaxation for sequence in sequences]
        epsilon, delta = np.array([(own.typical_epsilon, own.typical_delta) for own in limits]).T
        drafted = np.setdiff1d(np.arange(len(forest)), forest.roots)
        is_refused = np.ones(len(forest), dtype=np.bool_)
        if drafted.size:
            # Only rows behind which something was drafted are normalised.
            above, places = np.unique(forest.parents[drafted], return_inverse=True)
            device = logits.device
            rows = logits.index_select(0, upload(torch.from_numpy(above), device))
            probabilities = torch.softmax(rows.float(), dim=-1)
            index = upload(torch.from_numpy(np.stack([places, forest.token_ids[drafted]])), device)
            fetched = torch.stack(
                [
                    probabilities[index[0], index[1]],
                    torch.special.entr(probabilities).sum(-1)[index[0]],
                ]
            )
            own, entropies = fetched.cpu().numpy()
            owners = forest.owners[drafted]
            thresholds = np.minimum(epsilon[owners], delta[owners] * np.exp(-entropies))
            is_refused[drafted] = ~(own > thresholds)
        return Judgement((("threshold", is_refused),))
