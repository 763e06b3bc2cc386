"""Penalties on the logits of every tree node: bias, repetition, presence and frequency.

What depends on the committed text is kept between rounds and grows by the emitted ids; a round adds the path
tokens of each node. A node's row is what plain decoding would compute after the same text, to the bit: totals
are formed before anything is subtracted, so it does not matter which part of a text is committed and which is
drafted.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from paceline.engine.node_paths import GrowingIds, NodePaths
from paceline.sequence import Sequence
from paceline.tree import DraftTree


class LogitBias:
    """Adds a fixed amount to the logits of some tokens."""

    def __init__(self, amounts: Mapping[int, float], device: torch.device) -> None:
        self._ids = torch.tensor(list(amounts), dtype=torch.int64, device=device)
        self._amounts = torch.tensor(list(amounts.values()), dtype=torch.float32, device=device)

    def apply(self, logits: Tensor, tree: DraftTree, sequence: Sequence) -> None:  # noqa: ARG002
        """Add the amounts to every row."""
        logits.index_add_(1, self._ids, self._amounts.expand(logits.shape[0], -1))

    def extend(self, ids: Seq[int]) -> None:
        """The bias does not depend on the text."""


class RepetitionPenalty:
    """Divides positive and multiplies negative logits of every token of prompt and output, once.

    The penalty of CTRL (arXiv 1909.05858).

    Args:
        penalty: above 1 discourages repetition.
        token_ids: committed tokens.
        vocab_size: target vocabulary V.
        device: where the logits are.
    """

    def __init__(self, penalty: float, token_ids: Seq[int], vocab_size: int, device: torch.device) -> None:
        self._penalty = penalty
        self._known: set[int] = set()
        self._seen = GrowingIds([], device)
        self._is_seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)  # [V]
        self.extend(token_ids)

    def apply(self, logits: Tensor, tree: DraftTree, sequence: Sequence) -> None:  # noqa: ARG002
        """Penalise the tokens of each node's own history."""
        seen = self._seen.ids
        logits.index_copy_(1, seen, self._penalised(logits.index_select(1, seen)))
        path = NodePaths.of(tree, logits.device).token_ids  # [N + 1, K]
        values = logits.gather(1, path)
        # A token that occurs twice on a path is written twice with the same value.
        logits.scatter_(1, path, torch.where(self._is_seen[path], values, self._penalised(values)))

    def extend(self, ids: Seq[int]) -> None:
        """Add emitted tokens to the history."""
        new_ids = list(dict.fromkeys(i for i in ids if i not in self._known))
        self._known.update(new_ids)
        self._is_seen[self._seen.append(new_ids)] = True

    def _penalised(self, values: Tensor) -> Tensor:
        return torch.where(values < 0, values * self._penalty, values / self._penalty)


class OccurrencePenalty:
    """Subtracts `presence + frequency * count` from every token of the output, as OpenAI defines it.

    Args:
        presence: subtracted once.
        frequency: subtracted for each occurrence.
        output_ids: emitted tokens.
        vocab_size: target vocabulary V.
        device: where the logits are.
    """

    def __init__(
        self, presence: float, frequency: float, output_ids: Seq[int], vocab_size: int, device: torch.device
    ) -> None:
        self._presence = presence
        self._frequency = frequency
        self._known: set[int] = set()
        self._seen = GrowingIds([], device)
        self._counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)  # [V]
        self.extend(output_ids)

    def apply(self, logits: Tensor, tree: DraftTree, sequence: Sequence) -> None:  # noqa: ARG002
        """Penalise the tokens of the output and of each node's path."""
        paths = NodePaths.of(tree, logits.device)
        path = paths.token_ids  # [N + 1, K]
        values = logits.gather(1, path)
        seen = self._seen.ids
        logits.index_add_(1, seen, -self._amounts(self._counts[seen]).expand(logits.shape[0], -1))
        is_same = (path[:, :, None] == path[:, None, :]) & paths.is_drafted[:, None, :]  # [N + 1, K, K]
        counts = self._counts[path] + is_same.sum(dim=2)
        logits.scatter_(1, path, values - self._amounts(counts))

    def extend(self, ids: Seq[int]) -> None:
        """Count emitted tokens."""
        new_ids = list(dict.fromkeys(i for i in ids if i not in self._known))
        self._known.update(new_ids)
        self._seen.append(new_ids)
        added = torch.tensor(list(ids), dtype=torch.int64, device=self._counts.device)
        self._counts.index_add_(0, added, torch.ones_like(added, dtype=torch.float32))

    def _amounts(self, counts: Tensor) -> Tensor:
        """What to subtract from tokens that occurred `counts` times."""
        return counts * self._frequency + (counts > 0) * self._presence
