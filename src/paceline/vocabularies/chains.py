"""Second phrases behind the likeliest first ones, merged with the first ones into one draft tree.

A text can come about in several ways: as one phrase, or as a shorter one and another behind it. A node of the
tree is worth the sum over all of them, the chance that a first phrase covers it (the mass of its trie node)
plus, for every chained first phrase that ends above it, the chance of that phrase times the mass beneath the
node behind it. The sums never rise from parent to child, so the most valuable nodes form a tree as they do in
a single trie.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn import functional

from paceline.tree import DraftTree
from paceline.vocabularies.trie import TIE, TokenTrie

CHAINED_PHRASES = 4
"""First phrases, the likeliest ones, that a second one is guessed behind."""
FOLLOWER_NODES = 32
"""Nodes behind each of them that are looked at, at least."""
_BASE = -7046029254386353131
"""Odd multiplier of path hashes, which are numbers modulo 2**64."""


@dataclass(frozen=True, slots=True)
class SecondPhrases:
    """What is guessed behind the likeliest first phrases of B sequences.

    Attributes:
        entries: int64 [B, m], the first phrases.
        followers: [B, m, K], chances of the phrases behind each; what is missing to 1 is other text.
    """

    entries: Tensor
    followers: Tensor


@dataclass(frozen=True, slots=True)
class _Found:
    """What may enter the tree of one sequence; all on the CPU, in float64, in which node numbers are exact.

    Attributes:
        nodes: [n], nodes of the trie of first phrases, some of them -1, which is none.
        mass: [n], their worth.
        entries: [m], first phrases to go on from.
        followers: [m, k], nodes of the trie of followers.
        worth: [m, k], their worth behind those phrases.
        twin_mass: [m, k], worth of the node of the first trie that stands for the same text, else 0.
    """

    nodes: Tensor
    mass: Tensor
    entries: Tensor
    followers: Tensor
    worth: Tensor
    twin_mass: Tensor


@dataclass(frozen=True, slots=True)
class _Paths:
    """Nodes that are told apart by the hash of their path; the root's is 0. All int64 [n]."""

    hashes: Tensor
    parents: Tensor
    token_ids: Tensor
    depths: Tensor


@dataclass(frozen=True, slots=True)
class _Tables:
    """What is looked up where the probabilities are.

    Attributes:
        padded_ids: int64 [E, L], tokens of each phrase, padded with 0.
        lengths: int64 [E], how many there are.
        paths: int64 [E, L], nodes along each phrase from its first token on, -1 behind its end.
        hashes: int64 [T], path hash of each node of the trie of first phrases.
        sorted_hashes: the same in order.
        by_hash: int64 [T], the node of each of those.
        follower_hashes: path hash of each node of the trie of followers.
        follower_depths: its depth.
        powers: int64, the base of the hashes to the power of 0, 1, ...
    """

    padded_ids: Tensor
    lengths: Tensor
    paths: Tensor
    hashes: Tensor
    sorted_hashes: Tensor
    by_hash: Tensor
    follower_hashes: Tensor
    follower_depths: Tensor
    powers: Tensor

    def to(self, device: torch.device) -> _Tables:
        """A copy on a device."""
        return _Tables(*[getattr(self, field.name).to(device) for field in fields(self)])

    def ends(self, entries: Tensor) -> Tensor:
        """Trie node at which each phrase ends: int64 [...] -> int64 [...]."""
        return self.paths[entries].gather(-1, (self.lengths[entries] - 1)[..., None])[..., 0]


class PhraseChains:
    """Both tries and what merging them needs.

    Args:
        trie: of all phrases.
        token_ids: tokens of each phrase, in the order of the vocabulary.
        num_followers: phrases that may follow another: the first K of the vocabulary.
    """

    def __init__(self, trie: TokenTrie, token_ids: Seq[tuple[int, ...]], num_followers: int) -> None:
        self.trie = trie
        self.followers = TokenTrie(token_ids[:num_followers])
        longest = max(map(len, token_ids))
        hashes = _path_hashes(trie)
        order = hashes.argsort()
        self._tables = _Tables(
            padded_ids=padded_token_ids(token_ids),
            lengths=torch.tensor([len(ids) for ids in token_ids]),
            paths=_entry_paths(trie, longest),
            hashes=hashes,
            sorted_hashes=hashes[order],
            by_hash=order,
            follower_hashes=_path_hashes(self.followers),
            follower_depths=self.followers.depths,
            powers=_powers(int(self.followers.depths.max()) + 1),
        )
        self._on_devices: dict[torch.device, _Tables] = {torch.device("cpu"): self._tables}

    def likeliest(self, probabilities: Tensor) -> Tensor:
        """The first phrases to go on from: [B, E] -> entries int64 [B, m]."""
        return torch.topk(probabilities, min(CHAINED_PHRASES, probabilities.shape[1]), dim=1).indices

    def token_ids_of(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens of entries, padded with 0, and how many: int64 [...] -> int64 [..., L], int64 [...]."""
        tables = self._on(entries.device)
        return tables.padded_ids[entries], tables.lengths[entries]

    @torch.no_grad()
    def trees(
        self, roots: Seq[int], probabilities: Tensor, second: SecondPhrases, max_nodes: int
    ) -> list[DraftTree]:
        """The most valuable nodes of every sequence.

        Args:
            roots: newest token of each of the B sequences.
            probabilities: [B, E], chances of the first phrases, on any device.
            second: what is behind some of them.
            max_nodes: most drafted nodes of each.
        """
        found = self._candidates(probabilities, second, max_nodes)
        return [self._merged(root, row, max_nodes) for root, row in zip(roots, found, strict=True)]

    def _candidates(self, probabilities: Tensor, second: SecondPhrases, max_nodes: int) -> list[_Found]:
        """Chosen where the probabilities are; everything comes to the CPU in one transfer."""
        if probabilities.device.type == "mps":
            probabilities = probabilities.cpu()  # float64 does not exist there
        device = probabilities.device
        entries, followers = second.entries.to(device), second.followers.to(device)
        tables = self._on(device)
        mass = self.trie.node_mass(probabilities)
        # Node -1, the filling of `paths`, stands behind the last one and is worth nothing.
        padded = functional.pad(mass, (0, 1))
        last = len(self.trie)
        top = self.trie.top_nodes(mass, max_nodes)
        above = tables.paths[entries].flatten(1)
        nodes = torch.cat([top, above], dim=1)
        num_rows, num_first, _ = followers.shape
        # Chances in fp32 may sum to a little more than 1.
        behind = self.followers.node_mass(followers.flatten(0, 1)).clamp(max=1.0)
        best = self.followers.top_nodes(behind, max(max_nodes, FOLLOWER_NODES))
        chosen = best.view(num_rows, num_first, -1)
        # The chance comes out of the sums that the masses come from: a child must not round above its parent.
        chances = self.trie.entry_chances(probabilities, entries)
        worth = behind.gather(1, best).view_as(chosen) * chances[..., None]
        # The same text may be a path of the first trie: its mass there counts as well.
        start = tables.hashes[tables.ends(entries)][..., None]
        wanted = start * tables.powers[tables.follower_depths[chosen]] + tables.follower_hashes[chosen]
        place = torch.searchsorted(tables.sorted_hashes, wanted).clamp(max=last - 1)
        twin = torch.where(tables.sorted_hashes[place] == wanted, tables.by_hash[place], -1)
        own = padded.gather(1, twin.flatten(1).remainder(last + 1)).view_as(worth)
        parts = (nodes, padded.gather(1, nodes.remainder(last + 1)), entries, chosen, worth, own)
        shapes = [part.shape[1:] for part in parts]
        flat = torch.cat([part.flatten(1).double() for part in parts], dim=1).cpu()
        columns = torch.split(flat, [shape.numel() for shape in shapes], dim=1)
        rows = zip(
            *[torch.unflatten(column, 1, shape) for column, shape in zip(columns, shapes, strict=True)],
            strict=True,
        )
        return [_Found(*row) for row in rows]

    def _paths(self, found: _Found) -> _Paths:
        """Nodes of the first trie, then followers."""
        trie, behind, tables = self.trie, self.followers, self._tables
        nodes, entries, chosen = found.nodes.long(), found.entries.long(), found.followers.long()
        above = trie.parents[nodes]
        ends = tables.ends(entries)[:, None]
        start, depths, parents = tables.hashes[ends], behind.depths[chosen], behind.parents[chosen]
        follower_parents = start * tables.powers[depths - 1] + tables.follower_hashes[parents]
        columns = (
            (tables.hashes[nodes], start * tables.powers[depths] + tables.follower_hashes[chosen]),
            (
                torch.where(above < 0, 0, tables.hashes[above]),
                torch.where(parents < 0, start, follower_parents),
            ),
            (trie.token_ids[nodes], behind.token_ids[chosen]),
            (trie.depths[nodes], trie.depths[ends] + depths),
        )
        return _Paths(*[torch.cat([own, followers.flatten()]) for own, followers in columns])

    def _merged(self, root: int, found: _Found, max_nodes: int) -> DraftTree:
        """One sequence's tree."""
        is_node = found.nodes >= 0
        found = replace(found, nodes=found.nodes[is_node], mass=found.mass[is_node])
        paths = self._paths(found)
        known, number = torch.unique(paths.hashes, return_inverse=True)
        chained = torch.zeros(len(known), dtype=torch.float64)
        chained.index_add_(0, number[len(found.nodes) :], found.worth.flatten())
        own = torch.zeros_like(chained)
        own[number] = torch.cat([found.mass, found.twin_mass.flatten()])
        # Of the nodes that stand for one text any will do: they agree on everything but their worth.
        sample = torch.empty_like(known)
        sample[number] = torch.arange(len(number))
        depths = paths.depths[sample]
        values = (own + chained).clamp(max=1.0) * (1.0 - TIE * depths.double())
        kept = values.argsort(descending=True, stable=True)[:max_nodes]
        kept = kept[values[kept] > 0]
        kept = kept[depths[kept].argsort(stable=True)]
        kept = _without_orphans(kept, known, paths.parents[sample], depths)
        hashes, order = known[kept].sort()
        places = torch.searchsorted(hashes, paths.parents[sample[kept]]).clamp(max=max(len(order) - 1, 0))
        parents = torch.where(depths[kept] == 1, 0, order[places] + 1)
        return DraftTree(
            torch.cat([torch.tensor([root]), paths.token_ids[sample[kept]]]),
            torch.cat([torch.tensor([-1]), parents]),
            torch.cat([torch.ones(1), values[kept].float()]),
        )

    def _on(self, device: torch.device) -> _Tables:
        """The tables on a device; copied there once."""
        if device not in self._on_devices:
            self._on_devices[device] = self._tables.to(device)
        return self._on_devices[device]


def _without_orphans(kept: Tensor, hashes: Tensor, parents: Tensor, depths: Tensor) -> Tensor:
    """Nodes whose parents are kept as well.

    Sums that are all but 0 can round so that a parent is worth less than its child, and is left out alone.
    """
    while True:
        has_parent = (depths[kept] == 1) | torch.isin(parents[kept], hashes[kept])
        if bool(has_parent.all()):
            return kept
        kept = kept[has_parent]


def padded_token_ids(token_ids: Seq[tuple[int, ...]]) -> Tensor:
    """int64 [E, L]: tokens of each phrase, padded with 0 to the longest."""
    longest = max(map(len, token_ids))
    return torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in token_ids])


def _powers(count: int) -> Tensor:
    """_BASE to the power of 0, 1, ..., modulo 2**64."""
    powers = torch.ones(count, dtype=torch.int64)
    powers[1:] = _BASE
    return powers.cumprod(0)


def _path_hashes(trie: TokenTrie) -> Tensor:
    """int64 [T]: hash of the tokens down to each node; that of a path and one more token goes on from it."""
    hashes = torch.zeros(len(trie) + 1, dtype=torch.int64)  # the last one belongs to the root, node -1
    for depth in range(1, int(trie.depths.max()) + 1):
        nodes = (trie.depths == depth).nonzero()[:, 0]
        hashes[nodes] = hashes[trie.parents[nodes]] * _BASE + trie.token_ids[nodes] + 1
    return hashes[:-1]


def _entry_paths(trie: TokenTrie, longest: int) -> Tensor:
    """int64 [E, longest]: trie nodes along each entry from its first token on, -1 behind its end."""
    paths = torch.full((trie.num_entries, longest), -1, dtype=torch.int64)
    rows, nodes = torch.arange(trie.num_entries), trie.entry_nodes
    while rows.numel():
        paths[rows, trie.depths[nodes] - 1] = nodes
        nodes = trie.parents[nodes]
        rows, nodes = rows[nodes >= 0], nodes[nodes >= 0]
    return paths
