"""Chained phrases: the merged tree against a brute-force sum over all ways to write each path."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from paceline.tree import check_tree
from paceline.vocabularies.chains import CHAINED_PHRASES, PhraseChains, SecondPhrases
from paceline.vocabularies.trie import TokenTrie

ENTRIES = [(5,), (6,), (5, 6), (7, 8, 9), (5, 6, 7), (8,), (6, 5), (7,), (9, 9), (5, 6, 8)]
NUM_FOLLOWERS = 6


def chains_of() -> PhraseChains:
    return PhraseChains(TokenTrie(ENTRIES), ENTRIES, NUM_FOLLOWERS)


def brute_force(
    first: torch.Tensor, entries: list[int], behind: torch.Tensor
) -> dict[tuple[int, ...], float]:
    """Path -> chance that the text begins with it, as far as these phrases tell."""
    worth: dict[tuple[int, ...], float] = {}
    for entry, chance in zip(ENTRIES, first.tolist(), strict=True):
        for depth in range(1, len(entry) + 1):
            worth[entry[:depth]] = worth.get(entry[:depth], 0.0) + chance
    for (place, entry), follower in product(enumerate(entries), range(NUM_FOLLOWERS)):
        chance = float(first[entry]) * float(behind[place, follower])
        for depth in range(1, len(ENTRIES[follower]) + 1):
            path = ENTRIES[entry] + ENTRIES[follower][:depth]
            worth[path] = worth.get(path, 0.0) + chance
    return worth


def random_case(seed: int) -> tuple[torch.Tensor, SecondPhrases]:
    generator = torch.Generator().manual_seed(seed)
    first = torch.softmax(2 * torch.randn(1, len(ENTRIES), generator=generator), dim=1)
    scores = torch.randn(1, CHAINED_PHRASES, NUM_FOLLOWERS + 1, generator=generator)
    behind = torch.softmax(2 * scores, dim=2)[..., :-1]
    return first, SecondPhrases(chains_of().likeliest(first), behind)


def paths_of(tree) -> dict[tuple[int, ...], float]:
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree)):
        paths.append((*paths[int(tree.parents[node])], int(tree.token_ids[node])))
    return dict(zip(paths[1:], tree.node_values[1:].tolist(), strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_every_node_is_worth_the_sum_over_all_ways_to_write_it(seed):
    first, second = random_case(seed)
    [tree] = chains_of().trees([3], first, second, max_nodes=200)
    check_tree(tree)
    expected = brute_force(first[0], second.entries[0].tolist(), second.followers[0])
    assert paths_of(tree) == pytest.approx(expected, abs=1e-6)
    assert len(tree) - 1 == len(expected)


@pytest.mark.parametrize("max_nodes", [1, 3, 8, 15])
@pytest.mark.parametrize("seed", range(10))
def test_the_most_valuable_nodes_are_kept(seed, max_nodes):
    first, second = random_case(seed)
    [tree] = chains_of().trees([3], first, second, max_nodes)
    check_tree(tree)
    expected = sorted(brute_force(first[0], second.entries[0].tolist(), second.followers[0]).values())
    assert sorted(paths_of(tree).values()) == pytest.approx(expected[-max_nodes:], abs=1e-6)


@pytest.mark.parametrize("chance", [1e-7, 1e-10, 1.9e-22, 0.0])
def test_a_hardly_possible_phrase_leaves_no_orphans(chance):
    """What follows it is worth as little as itself, and must not come to stand without it."""
    entries = [(1,), (2,)]
    chains = PhraseChains(TokenTrie(entries), entries, 2)
    first = torch.tensor([[1.0, chance]])
    followers = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
    for max_nodes in (1, 2, 3, 64):
        [tree] = chains.trees([3], first, SecondPhrases(torch.tensor([[0, 1]]), followers), max_nodes)
        check_tree(tree)
        check_tree(tree.take(2))
        # Not under another node either.
        assert set(paths_of(tree)) <= {(1,), (2,), (1, 2), (2, 1)}


def test_rows_do_not_mix():
    cases = [random_case(seed) for seed in (1, 2, 3)]
    first = torch.cat([case[0] for case in cases])
    second = SecondPhrases(
        *[torch.cat([getattr(case[1], name) for case in cases]) for name in SecondPhrases.__slots__]
    )
    together = chains_of().trees([3, 4, 5], first, second, 9)
    alone = [chains_of().trees([3 + i], *case, 9)[0] for i, case in enumerate(cases)]
    assert [paths_of(tree) for tree in together] == [paths_of(tree) for tree in alone]
    assert [int(tree.token_ids[0]) for tree in together] == [3, 4, 5]


def test_impossible_followers_add_nothing():
    first, second = random_case(5)
    without = SecondPhrases(second.entries, torch.zeros_like(second.followers))
    [tree] = chains_of().trees([3], first, without, 200)
    assert max(len(path) for path in paths_of(tree)) == 3
    assert paths_of(tree) == pytest.approx(brute_force(first[0], [], second.followers[0]), abs=1e-6)


def test_tokens_of_entries_are_padded():
    padded, lengths = chains_of().token_ids_of(torch.tensor([[3, 0]]))
    assert padded.tolist() == [[[7, 8, 9], [5, 0, 0]]]
    assert lengths.tolist() == [[3, 1]]
