"""All phrases merged into one token trie, and the draft tree that is worth most under given probabilities.

A trie node is worth the summed probability of all entries beneath it: the chance that its token is accepted,
as far as the head knows. Entries sorted by their tokens put those beneath a node next to each other, so the
worth of every node is one difference of a running sum. A parent's sum contains its child's, hence the most
valuable nodes always form a tree, and no other tree of as many nodes has a larger total, which is the
expected number of accepted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from paceline.errors import ShapeError

TIE = 1e-9
"""Relative handicap per level: a parent wins a tie with its child; far below any real difference."""


@dataclass(frozen=True, slots=True)
class ValuableNodes:
    """The most valuable nodes of the trie for one sequence.

    Attributes:
        nodes: int64 [n], closed under parents, most valuable first.
        values: float64 [n], their worth, at most 1 and never above a parent's.
    """

    nodes: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class _MassTensors:
    """What turns probabilities into the worth of nodes, on one device; as in `TokenTrie`."""

    entry_order: Tensor
    entry_nodes: Tensor
    starts: Tensor
    ends: Tensor
    handicap: Tensor


@dataclass(frozen=True, slots=True)
class TrieMatch:
    """How far the text goes along with the trie at each of T positions.

    Attributes:
        entries: int64 [T], longest entry whose tokens begin at the position, or -1.
        nodes: int64 [T], deepest node reached from the position, or -1.
    """

    entries: Tensor
    nodes: Tensor


class TokenTrie:
    """A static trie over E distinct token sequences; the root is no node and is written -1.

    Nodes are numbered breadth-first, and siblings by token, so that `parents[i] < i`.

    Attributes:
        token_ids: int64 [T], token of each node.
        parents: int64 [T], parent of each node, -1 below the root.
        depths: int64 [T], 1 below the root.
        entry_order: int64 [E], entries sorted by their tokens.
        starts: int64 [T], first place in `entry_order` beneath each node.
        ends: int64 [T], place after the last one.
        entry_nodes: int64 [E], node at which each entry ends.

    Raises:
        ShapeError: an entry is empty or given twice.
    """

    def __init__(self, entries: Seq[Seq[int]]) -> None:
        self.num_entries = len(entries)
        order = sorted(range(len(entries)), key=lambda entry: tuple(entries[entry]))
        self.entry_order = torch.tensor(order, dtype=torch.int64)
        self._number([tuple(entries[entry]) for entry in order])
        self.entry_nodes = torch.empty(len(entries), dtype=torch.int64)
        self.entry_nodes[self.entry_order] = self._sorted_entry_nodes
        # What matching needs, in numpy: children are found by binary search, since node order is key order.
        self._stride = int(self.token_ids.max()) + 1 if len(self) else 1
        self._keys: NDArray[np.int64] = ((self.parents + 1) * self._stride + self.token_ids).numpy()
        self._entry_at = np.full(len(self), -1, dtype=np.int64)
        self._entry_at[self.entry_nodes.numpy()] = np.arange(len(entries))
        # Nodes of equal worth are ordered by depth: see `TIE`.
        handicap = 1.0 - TIE * self.depths.to(torch.float64)
        tensors = _MassTensors(self.entry_order, self.entry_nodes, self.starts, self.ends, handicap)
        self._mass_tensors: dict[torch.device, _MassTensors] = {handicap.device: tensors}

    def __len__(self) -> int:
        """Number of nodes, the root not counted."""
        return self.token_ids.shape[0]

    def _number(self, ordered: list[tuple[int, ...]]) -> None:
        """Fill the node arrays from the entries in token order."""
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        starts: list[int] = []
        ends: list[int] = []
        entry_nodes = [-1] * len(ordered)
        # One level at a time: `reached` is the node at which each entry stands after `depth` tokens.
        reached = [-1] * len(ordered)
        alive = list(range(len(ordered)))
        depth = 0
        while alive:
            depth += 1
            survivors = []
            last: tuple[int, int] | None = None
            for place in alive:
                entry = ordered[place]
                if len(entry) < depth:
                    raise ShapeError("a phrase entry has no tokens: each needs at least one")
                edge = (reached[place], entry[depth - 1])
                if edge != last:
                    last = edge
                    tokens.append(edge[1])
                    parents.append(edge[0])
                    depths.append(depth)
                    starts.append(place)
                    ends.append(place)
                node = reached[place] = len(tokens) - 1
                ends[node] = place + 1
                if len(entry) > depth:
                    survivors.append(place)
                elif starts[node] != place:
                    raise ShapeError(f"token sequence {list(entry)} is given twice: entries must be distinct")
                else:
                    entry_nodes[place] = node
            alive = survivors
        self.token_ids = torch.tensor(tokens, dtype=torch.int64)
        self.parents = torch.tensor(parents, dtype=torch.int64)
        self.depths = torch.tensor(depths, dtype=torch.int64)
        self.starts = torch.tensor(starts, dtype=torch.int64)
        self.ends = torch.tensor(ends, dtype=torch.int64)
        self._sorted_entry_nodes = torch.tensor(entry_nodes, dtype=torch.int64)

    def node_mass(self, probabilities: Tensor) -> Tensor:
        """Worth of every node: [B, E] probabilities -> float64 [B, T], a parent's never below its child's."""
        if probabilities.shape[-1] != self.num_entries:
            raise ShapeError(
                f"{probabilities.shape[-1]} probabilities for {self.num_entries} entries: give one each"
            )
        tensors = self._on(probabilities.device)
        running = self._running(probabilities)
        return running[:, tensors.ends] - running[:, tensors.starts]

    def entry_chances(self, probabilities: Tensor, entries: Tensor) -> Tensor:
        """Chances of some entries out of the sums that `node_mass` takes, so that they round alike.

        Args:
            probabilities: [B, E].
            entries: int64 [B, m].

        Returns:
            float64 [B, m], never above the mass of the node at which the entry ends.
        """
        tensors = self._on(probabilities.device)
        # Of all entries beneath that node the one that ends there comes first.
        places = tensors.starts[tensors.entry_nodes[entries]]
        running = self._running(probabilities)
        return running.gather(1, places + 1) - running.gather(1, places)

    def _running(self, probabilities: Tensor) -> Tensor:
        """float64 [B, E + 1]: sums over the entries in the order of their tokens."""
        running = probabilities[:, self._on(probabilities.device).entry_order]
        running = running.cumsum(dim=1, dtype=torch.float64)
        if running.device.type != "cpu":
            # A sum in parallel may fall by a rounding error, and a child would be worth more than its parent.
            running = running.cummax(dim=1).values
        return functional.pad(running, (1, 0))

    def _on(self, device: torch.device) -> _MassTensors:
        """The tensors on a device; copied there once."""
        if device not in self._mass_tensors:
            [own] = [t for d, t in self._mass_tensors.items() if d.type == "cpu"]
            moved = [getattr(own, field.name).to(device) for field in fields(own)]
            self._mass_tensors[device] = _MassTensors(*moved)
        return self._mass_tensors[device]

    @torch.no_grad()
    def most_valuable(self, probabilities: Tensor, max_nodes: int) -> list[ValuableNodes]:
        """The `max_nodes` most valuable nodes of every row; nodes worth nothing are left out.

        Args:
            probabilities: [B, E] on any device. What is found comes to the CPU in one transfer.
            max_nodes: most nodes per row.
        """
        if probabilities.device.type == "mps":
            probabilities = probabilities.cpu()  # float64 does not exist there
        mass = self.node_mass(probabilities)
        top = self.top_nodes(mass, max_nodes)
        values = mass.gather(1, top).clamp(max=1.0)
        if mass.device.type != "cpu":
            # Numbers of nodes are exact in float64.
            numbers, values = torch.stack([top.double(), values]).cpu().unbind()
            top = numbers.long()
        counts = (values > 0).sum(dim=1).tolist()
        return [
            ValuableNodes(nodes[:count], worth[:count])
            for nodes, worth, count in zip(top, values, counts, strict=True)
        ]

    def top_nodes(self, mass: Tensor, max_nodes: int) -> Tensor:
        """Nodes of the largest mass, an upper one first where it is equal: [B, T] -> int64 [B, n]."""
        handicap = self._on(mass.device).handicap
        return torch.topk(mass * handicap, min(max_nodes, len(self)), dim=1).indices

    def match(self, token_ids: Tensor | Seq[int]) -> TrieMatch:
        """Walk the trie from every position of a text at once: int64 [T] tokens, no re-tokenisation."""
        ids: NDArray[np.int64] = np.asarray(token_ids, dtype=np.int64)
        entries = np.full(len(ids), -1, dtype=np.int64)
        nodes = np.full(len(ids), -1, dtype=np.int64)
        positions = np.arange(len(ids))
        depth = 0
        while positions.size and len(self):
            token = ids[positions + depth]
            keys = (nodes[positions] + 1) * self._stride + token
            found = np.minimum(np.searchsorted(self._keys, keys), len(self) - 1)
            is_child = (self._keys[found] == keys) & (token >= 0) & (token < self._stride)
            positions, found = positions[is_child], found[is_child]
            nodes[positions] = found
            ended = self._entry_at[found]
            entries[positions] = np.where(ended >= 0, ended, entries[positions])
            depth += 1
            positions = positions[positions + depth < len(ids)]
        return TrieMatch(torch.from_numpy(entries), torch.from_numpy(nodes))
