"""Draft trees: what a drafter proposes and a verifier walks.

Node 0 is the root: the last committed token, whose keys and values are not in the cache yet. Every other node
is a drafted token; `parents[i] < i` holds for all of them, so one left-to-right pass visits parents first.
Siblings carry different tokens: equal prefixes share a node, which makes the path that a verifier accepts
unique.

Trees live on the CPU: they are small (at most a few hundred nodes), are built once a round from one transfer,
and the masks and index tensors derived from them are moved to the device in one piece.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import ShapeError


@dataclass(frozen=True)
class DraftTree:
    """A root and N drafted nodes.

    Attributes:
        token_ids: int64 [N + 1], target token of each node; entry 0 is the last committed token.
        parents: int64 [N + 1], `parents[0] == -1` and `parents[i] < i`.
        node_values: float32 [N + 1], the drafter's estimate that the node is accepted, never above its
            parent's;
            the root has 1.
    """

    token_ids: Tensor
    parents: Tensor
    node_values: Tensor

    def __len__(self) -> int:
        """Number of nodes, root included."""
        return self.token_ids.shape[0]

    @property
    def num_draft_tokens(self) -> int:
        """Number of drafted nodes: the root is not one."""
        return len(self) - 1

    @cached_property
    def depths(self) -> Tensor:
        """int64 [N + 1]: number of edges between the root and each node."""
        depths: list[int] = []
        for parent in self.parents.tolist():
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return torch.tensor(depths)

    @cached_property
    def ancestors(self) -> Tensor:
        """Bool [N + 1, N + 1]: entry (i, j) is true when node j is node i or above it."""
        num_nodes = len(self)
        matrix = torch.zeros(num_nodes, num_nodes, dtype=torch.bool)
        rows = torch.arange(num_nodes)
        current = rows
        # One step up for all nodes at once: as many iterations as the tree is deep.
        while rows.numel():
            matrix[rows, current] = True
            current = self.parents[current]
            alive = current >= 0
            rows, current = rows[alive], current[alive]
        return matrix

    @cached_property
    def path_table(self) -> Tensor:
        """int64 [N + 1, K + 1]: nodes from the root down to each node, right-padded with -1."""
        depths = self.depths
        table = torch.full((len(self), int(depths.max()) + 1), -1, dtype=torch.int64)
        node, above = self.ancestors.nonzero(as_tuple=True)
        table[node, depths[above]] = above
        return table

    def num_matched(self, token_ids: Seq[int]) -> int:
        """How many of `token_ids`, from the first on, are spelled by a path below the root."""
        children = {
            (parent, token_id): node
            for node, (parent, token_id) in enumerate(
                zip(self.parents.tolist(), self.token_ids.tolist(), strict=True)
            )
        }
        node = 0
        for number, token_id in enumerate(token_ids):
            child = children.get((node, token_id))
            if child is None:
                return number
            node = child
        return len(token_ids)

    def merged(self, other: DraftTree) -> DraftTree:
        """One tree with the nodes of both, equal prefixes shared; both must have the same root.

        A node that both propose is worth the chance that either is right, as if they erred independently.
        Never less than what stands below it, since that holds in both trees.
        """
        if len(other) == 1:
            return self
        token_ids, parents = self.token_ids.tolist(), self.parents.tolist()
        values = self.node_values.tolist()
        if other.token_ids[0] != token_ids[0]:
            raise ShapeError(
                f"trees with roots {token_ids[0]} and {int(other.token_ids[0])} cannot be merged: "
                "they follow different tokens"
            )
        nodes = {
            (parent, token_id): node
            for node, (parent, token_id) in enumerate(zip(parents, token_ids, strict=True))
        }
        places = [0]
        rows = zip(other.parents.tolist(), other.token_ids.tolist(), other.node_values.tolist(), strict=True)
        for parent, token_id, value in list(rows)[1:]:
            key = (places[parent], token_id)
            node = nodes.get(key)
            if node is None:
                node = nodes[key] = len(token_ids)
                token_ids.append(token_id)
                parents.append(key[0])
                values.append(value)
            else:
                values[node] = 1.0 - (1.0 - values[node]) * (1.0 - value)
            places.append(node)
        return DraftTree(
            torch.tensor(token_ids), torch.tensor(parents), torch.tensor(values, dtype=torch.float32)
        )

    def with_values(self, node_values: Tensor) -> DraftTree:
        """The same nodes with other values: float32 [N + 1], never rising from parent to child."""
        tree = DraftTree(self.token_ids, self.parents, node_values)
        # What was found out about the shape stays true.
        tree.__dict__.update({name: self.__dict__[name] for name in _SHAPES if name in self.__dict__})
        return tree

    def take(self, max_nodes: int) -> DraftTree:
        """Keep the `max_nodes` most valuable drafted nodes (parents win ties, so the result is a tree)."""
        if max_nodes >= self.num_draft_tokens:
            return self
        order = np.argsort(-self.node_values.numpy()[1:], kind="stable")[: max(max_nodes, 0)] + 1
        kept = np.concatenate([_ROOT, np.sort(order)])
        return self._select(kept)

    def selected(self, nodes: NDArray[np.int64], node_values: NDArray[np.float32]) -> DraftTree:
        """The sub-tree of some drafted nodes, with other values.

        Args:
            nodes: int64 [n], ascending, the root left out, closed under parents.
            node_values: float32 [N + 1], of all nodes.
        """
        if len(nodes) == self.num_draft_tokens:
            return self.with_values(torch.from_numpy(node_values))
        kept = np.concatenate([_ROOT, nodes])
        return self._select(kept, node_values)

    def without_tokens_from(self, vocab_size: int) -> DraftTree:
        """Drop nodes whose token id is not in [0, vocab_size), and everything below them."""
        drafted = self.token_ids.numpy()[1:]
        if not drafted.size or (drafted.min() >= 0 and drafted.max() < vocab_size):
            return self
        bad = (self.token_ids < 0) | (self.token_ids >= vocab_size)
        bad[0] = False
        below_bad = (self.ancestors & bad).any(dim=1)
        return self._select((~below_bad).nonzero(as_tuple=True)[0].numpy())

    def clamp_depth(self, max_depth: int) -> DraftTree:
        """Drop nodes deeper than `max_depth`: no draft may run past the room that is left."""
        if self.num_draft_tokens <= max_depth or int(self.depths.max()) <= max_depth:
            return self
        return self._select((self.depths <= max(max_depth, 0)).nonzero(as_tuple=True)[0].numpy())

    def _select(self, kept: NDArray[np.int64], node_values: NDArray[np.float32] | None = None) -> DraftTree:
        """The sub-tree of the nodes `kept` (ascending, root first, closed under parents).

        In numpy, whose operations on a few dozen numbers take a fraction of torch's: every tree of every
        round comes along here.
        """
        new_index = np.full(len(self) + 1, -1, dtype=np.int64)
        new_index[kept] = np.arange(kept.shape[0])
        # parents[0] is -1, which reads the last entry of new_index: -1 again.
        tree = DraftTree(
            torch.from_numpy(self.token_ids.numpy()[kept]),
            torch.from_numpy(new_index[self.parents.numpy()[kept]]),
            torch.from_numpy((self.node_values.numpy() if node_values is None else node_values)[kept]),
        )
        if "depths" in self.__dict__:
            tree.__dict__["depths"] = torch.from_numpy(self.depths.numpy()[kept])
        return tree

    @classmethod
    def root_only(cls, token_id: int) -> DraftTree:
        """A tree that drafts nothing: verifying it is one plain decoding step."""
        return cls(torch.tensor([token_id]), torch.tensor([-1]), torch.ones(1))

    @classmethod
    def from_chain(
        cls, root_token_id: int, token_ids: Seq[int], values: Seq[float] | None = None
    ) -> DraftTree:
        """A chain of drafted tokens, each the child of the one before.

        Args:
            root_token_id: last committed token.
            token_ids: drafted tokens in order; may be empty.
            values: estimated chance that each is accepted, as a running product; all 1 when absent.
        """
        num_nodes = len(token_ids) + 1
        node_values = torch.ones(num_nodes)
        if values is not None:
            if len(values) != len(token_ids):
                raise ShapeError(
                    f"{len(values)} values for {len(token_ids)} drafted tokens: give one value a token"
                )
            node_values[1:] = torch.as_tensor(values, dtype=torch.float32)
        return cls(
            torch.tensor([root_token_id, *token_ids]),
            torch.arange(-1, num_nodes - 1),
            node_values.cummin(dim=0).values,
        )

    @classmethod
    def from_paths(
        cls, root_token_id: int, paths: Seq[Seq[int]], values: Seq[float] | None = None
    ) -> DraftTree:
        """Merge candidate continuations into one token trie; equal prefixes share a node.

        Args:
            root_token_id: last committed token.
            paths: candidate continuations; empty ones add nothing.
            values: estimated chance of each candidate; a node is worth the sum over the candidates through
                it,
                at most 1. Without values every node is worth 1.
        """
        children: dict[tuple[int, int], int] = {}
        token_ids, parents, node_values = [root_token_id], [-1], [1.0]
        for number, path in enumerate(paths):
            worth = 1.0 if values is None else float(values[number])
            node = 0
            for token_id in path:
                child = children.get((node, token_id))
                if child is None:
                    child = children[node, token_id] = len(token_ids)
                    token_ids.append(token_id)
                    parents.append(node)
                    node_values.append(worth)
                elif values is not None:
                    node_values[child] = min(1.0, node_values[child] + worth)
                node = child
        for node in range(1, len(token_ids)):
            node_values[node] = min(node_values[node], node_values[parents[node]])
        return cls(torch.tensor(token_ids), torch.tensor(parents), torch.tensor(node_values))

    @classmethod
    def from_trie_mass(
        cls, root_token_id: int, token_ids: Tensor, parents: Tensor, values: Tensor, chosen: Tensor
    ) -> DraftTree:
        """Cut the nodes `chosen` out of a static trie.

        Args:
            root_token_id: last committed token.
            token_ids: int64 [T], token of each trie node.
            parents: int64 [T], parent trie node, below the node's own number; -1 below the root.
            values: float [B], worth of each chosen node; a parent's is not below its child's.
            chosen: int64 [B], trie nodes, closed under parents, in any order.
        """
        order = torch.argsort(chosen)
        chosen, values = chosen[order], values[order]
        trie_parents = parents[chosen]
        # `chosen` is sorted, so a parent's place is found by binary search; -1 (the root) becomes node 0.
        tree_parents = torch.searchsorted(chosen, trie_parents) + 1
        tree_parents[trie_parents < 0] = 0
        return cls(
            torch.cat([torch.tensor([root_token_id]), token_ids[chosen]]),
            torch.cat([torch.tensor([-1]), tree_parents]),
            torch.cat([torch.ones(1), values.to(torch.float32)]),
        )

    @classmethod
    def from_topk(
        cls,
        root_token_id: int,
        token_ids: Seq[Tensor],
        log_probs: Seq[Tensor],
        parents: Seq[Tensor],
        max_nodes: int,
    ) -> DraftTree:
        """Rerank a tree grown level by level and keep the most likely nodes (EAGLE-2's dynamic tree).

        Args:
            root_token_id: last committed token.
            token_ids: per level, int64 [k] tokens.
            log_probs: per level, float [k] cumulative log-probabilities from the root.
            parents: per level, int64 [k] index into the level above (ignored on the first level).
            max_nodes: drafted nodes to keep.
        """
        all_tokens, all_values, all_parents = (
            [torch.tensor([root_token_id])],
            [torch.ones(1)],
            [torch.tensor([-1])],
        )
        start_above, start = 0, 1
        for level, level_tokens in enumerate(token_ids):
            above = torch.zeros_like(level_tokens) if level == 0 else parents[level]
            all_tokens.append(level_tokens)
            all_values.append(log_probs[level].exp())
            all_parents.append(above + start_above)
            start_above, start = start, start + level_tokens.shape[0]
        tree = cls(torch.cat(all_tokens), torch.cat(all_parents), torch.cat(all_values).clamp(max=1.0))
        return tree.take(max_nodes)


_SHAPES = ("depths", "ancestors", "path_table")
_ROOT = np.zeros(1, dtype=np.int64)


def check_tree(tree: DraftTree) -> None:
    """Raise ShapeError unless `tree` is a tree as DraftTree describes it (for tests and foreign drafters)."""
    num_nodes = len(tree)
    if num_nodes == 0 or tree.parents.shape != (num_nodes,) or tree.node_values.shape != (num_nodes,):
        raise ShapeError(
            f"draft tree fields have shapes {tuple(tree.token_ids.shape)}, {tuple(tree.parents.shape)}, "
            f"{tuple(tree.node_values.shape)}: all must be [N + 1] with N >= 0"
        )
    parents, values, tokens = tree.parents.tolist(), tree.node_values.tolist(), tree.token_ids.tolist()
    if parents[0] != -1:
        raise ShapeError(f"the root's parent is {parents[0]}: it must be -1")
    seen: set[tuple[int, int]] = set()
    for node in range(1, num_nodes):
        if not 0 <= parents[node] < node:
            raise ShapeError(f"parent of node {node} is {parents[node]}: it must be in [0, {node})")
        if values[node] > values[parents[node]]:
            raise ShapeError(
                f"node {node} is worth {values[node]}, above its parent's {values[parents[node]]}"
            )
        if (parents[node], tokens[node]) in seen:
            raise ShapeError(
                f"node {node} repeats token {tokens[node]} under parent {parents[node]}: merge them"
            )
        seen.add((parents[node], tokens[node]))
