"""Losses of a phrase head: all are the negative logarithm of a probability mass over some entries.

- `longest`: the mass of the longest entry that the text begins with (cross-entropy).
- `mass`: the mass beneath the deepest trie node that the text reaches. A text that leaves the trie half way
  down an entry still confirms the tokens above, which `longest` would credit to a shorter entry only.
- `mean_mass`: the mean over all nodes on the way down to it, which is what the draft tree is scored by.

A node's entries are consecutive in the trie's order, so every case is a log-sum-exp over a range of that
order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from paceline.config import check_known
from paceline.vocabularies.trie import TokenTrie

LOSSES = ("longest", "mass", "mean_mass")


@dataclass(frozen=True, slots=True)
class PhraseLoss:
    """One of the losses above for a given trie.

    Attributes:
        kind: which.
        trie: of the vocabulary.
    """

    kind: str
    trie: TokenTrie

    def __post_init__(self) -> None:
        """Refuse unknown names."""
        check_known("loss", self.kind, LOSSES)

    def __call__(self, scores: Tensor, entries: Tensor, nodes: Tensor) -> Tensor:
        """Mean loss of a batch; 0 for an empty one.

        Args:
            scores: [M, E].
            entries: int64 [M], longest entry of each sample.
            nodes: int64 [M], deepest node of each sample.
        """
        if not scores.shape[0]:
            return scores.sum() * 0.0
        log_probs = functional.log_softmax(scores.float(), dim=1)
        if self.kind == "longest":
            return functional.nll_loss(log_probs, entries)
        if self.kind == "mass":
            samples = torch.arange(scores.shape[0], device=scores.device)
            return -self._log_mass(log_probs, samples, nodes).mean()
        samples, above = path_nodes(self.trie.parents, nodes)
        depths = self.trie.depths.to(nodes.device)[nodes]
        return -(self._log_mass(log_probs, samples, above) / depths[samples]).sum() / scores.shape[0]

    def _log_mass(self, log_probs: Tensor, samples: Tensor, nodes: Tensor) -> Tensor:
        """Log of the mass beneath each node: row `samples[i]`, node `nodes[i]` -> [P]."""
        device = log_probs.device
        starts, ends = self.trie.starts.to(device)[nodes], self.trie.ends.to(device)[nodes]
        lengths = ends - starts
        pairs = torch.repeat_interleave(torch.arange(len(nodes), device=device), lengths)
        offsets = torch.arange(len(pairs), device=device) - (lengths.cumsum(0) - lengths)[pairs]
        entries = self.trie.entry_order.to(device)[starts[pairs] + offsets]
        values = log_probs[samples[pairs], entries]
        # The largest value of each node is taken out before the exponential, as in log-sum-exp.
        largest = torch.full((len(nodes),), -torch.inf, device=device)
        largest = largest.scatter_reduce(0, pairs, values.detach(), "amax")
        sums = torch.zeros(len(nodes), device=device).index_add(0, pairs, (values - largest[pairs]).exp())
        return sums.log() + largest


def path_nodes(parents: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """All nodes from the first level down to each given node: sample numbers [P] and nodes [P]."""
    parents = parents.to(nodes.device)
    samples, found = [], []
    remaining = torch.arange(len(nodes), device=nodes.device)
    current = nodes
    while remaining.numel():
        samples.append(remaining)
        found.append(current)
        current = parents[current]
        remaining, current = remaining[current >= 0], current[current >= 0]
    if not samples:
        return remaining, current
    return torch.cat(samples), torch.cat(found)
