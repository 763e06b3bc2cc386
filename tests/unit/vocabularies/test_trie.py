"""The trie against brute force: mass, choice of nodes, matching."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ShapeError
from paceline.tree import DraftTree, check_tree
from paceline.vocabularies.trie import TokenTrie

ENTRIES = st.lists(
    st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), min_size=1, max_size=12, unique=True
)
SMALL_ENTRIES = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5, unique=True
)


def prefixes(trie: TokenTrie) -> list[tuple[int, ...]]:
    """Tokens from the root down to every node."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(trie.token_ids.tolist(), trie.parents.tolist(), strict=True):
        paths.append(((*paths[parent],) if parent >= 0 else ()) + (token,))
    return paths


def probabilities_of(entries: list[tuple[int, ...]], seed: int, *, ties: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if ties:
        weights = torch.randint(0, 3, (1, len(entries)), generator=generator).float() + (len(entries) == 1)
        weights[0, 0] += 1
        return weights / weights.sum()
    return torch.softmax(3 * torch.randn(1, len(entries), generator=generator), dim=1)


@settings(deadline=None, max_examples=60)
@given(ENTRIES)
def test_nodes_are_the_distinct_prefixes_with_parents_first(entries: list[tuple[int, ...]]) -> None:
    trie = TokenTrie(entries)
    paths = prefixes(trie)
    assert set(paths) == {entry[:length] for entry in entries for length in range(1, len(entry) + 1)}
    assert len(paths) == len(set(paths)) == len(trie)
    assert [paths[node] for node in trie.entry_nodes.tolist()] == entries
    assert trie.depths.tolist() == [len(path) for path in paths]
    assert all(parent < node for node, parent in enumerate(trie.parents.tolist()))


@settings(deadline=None, max_examples=60)
@given(ENTRIES, st.integers(0, 99))
def test_a_node_is_worth_all_entries_beneath_it(entries: list[tuple[int, ...]], seed: int) -> None:
    trie, probabilities = TokenTrie(entries), probabilities_of(entries, seed)
    mass = trie.node_mass(probabilities)[0]
    for node, path in enumerate(prefixes(trie)):
        beneath = [i for i, entry in enumerate(entries) if entry[: len(path)] == path]
        assert mass[node].item() == pytest.approx(probabilities[0, beneath].sum().item(), abs=1e-6)


@settings(deadline=None, max_examples=60)
@given(ENTRIES, st.integers(0, 99))
def test_no_node_is_worth_more_than_its_parent(entries: list[tuple[int, ...]], seed: int) -> None:
    trie = TokenTrie(entries)
    mass = trie.node_mass(probabilities_of(entries, seed))[0]
    below = trie.parents >= 0
    assert (mass[below] <= mass[trie.parents[below]]).all()


@settings(deadline=None, max_examples=60)
@given(SMALL_ENTRIES, st.integers(0, 99), st.integers(1, 6), st.booleans())
def test_the_chosen_tree_is_worth_as_much_as_any_tree_of_its_size(
    entries: list[tuple[int, ...]], seed: int, max_nodes: int, ties: bool
) -> None:
    trie, probabilities = TokenTrie(entries), probabilities_of(entries, seed, ties=ties)
    mass = trie.node_mass(probabilities)[0]
    parents = trie.parents.tolist()
    best = max(
        sum(mass[node].item() for node in nodes)
        for nodes in combinations(range(len(trie)), min(max_nodes, len(trie)))
        if all(parents[node] < 0 or parents[node] in nodes for node in nodes)
    )
    [chosen] = trie.most_valuable(probabilities, max_nodes)
    assert chosen.values.sum().item() == pytest.approx(best, abs=1e-6)


@settings(deadline=None, max_examples=60)
@given(ENTRIES, st.integers(0, 99), st.integers(1, 30), st.booleans())
def test_the_chosen_nodes_form_a_draft_tree(
    entries: list[tuple[int, ...]], seed: int, max_nodes: int, ties: bool
) -> None:
    trie = TokenTrie(entries)
    [chosen] = trie.most_valuable(probabilities_of(entries, seed, ties=ties), max_nodes)
    parents = trie.parents[chosen.nodes].tolist()
    nodes = chosen.nodes.tolist()
    assert all(parent < 0 or parent in nodes[:place] for place, parent in enumerate(parents))
    assert (chosen.values > 0).all()
    tree = DraftTree.from_trie_mass(9, trie.token_ids, trie.parents, chosen.values, chosen.nodes)
    check_tree(tree)
    assert tree.num_draft_tokens == len(nodes) <= max_nodes


def test_the_tail_of_an_entry_is_drafted_parent_first() -> None:
    trie = TokenTrie([(5, 6, 7, 8), (5,), (4,)])
    [chosen] = trie.most_valuable(torch.tensor([[0.6, 0.0, 0.4]]), 3)
    assert [prefixes(trie)[node] for node in chosen.nodes.tolist()] == [(5,), (5, 6), (5, 6, 7)]


def test_nodes_worth_nothing_are_left_out() -> None:
    trie = TokenTrie([(1,), (2, 3), (4,)])
    [chosen] = trie.most_valuable(torch.tensor([[0.25, 0.0, 0.75]]), 10)
    assert trie.token_ids[chosen.nodes].tolist() == [4, 1]


def test_rows_of_a_batch_are_chosen_as_they_would_be_alone() -> None:
    entries = [(1,), (1, 2), (1, 3), (4, 5, 6), (7,)]
    trie, rows = (
        TokenTrie(entries),
        torch.softmax(torch.randn(4, 5, generator=torch.manual_seed(3)) * 4, dim=1),
    )
    for row, together in zip(rows, trie.most_valuable(rows, 3), strict=True):
        [alone] = trie.most_valuable(row[None], 3)
        assert torch.equal(alone.nodes, together.nodes)
        assert torch.equal(alone.values, together.values)


def test_values_never_exceed_one() -> None:
    [chosen] = TokenTrie([(1,), (1, 2), (1, 3)]).most_valuable(torch.tensor([[0.4, 0.3, 0.3000002]]), 3)
    assert chosen.values.max() == 1.0


@settings(deadline=None, max_examples=60)
@given(ENTRIES, st.lists(st.integers(0, 5), max_size=15))
def test_matching_finds_the_longest_entry_and_the_deepest_node(
    entries: list[tuple[int, ...]], text: list[int]
) -> None:
    trie = TokenTrie(entries)
    paths, match = prefixes(trie), trie.match(text)
    for position in range(len(text)):
        rest = tuple(text[position:])
        found = [i for i, entry in enumerate(entries) if rest[: len(entry)] == entry]
        reached = [node for node, path in enumerate(paths) if rest[: len(path)] == path]
        assert match.entries[position] == max(found, key=lambda i: len(entries[i]), default=-1)
        assert match.nodes[position] == max(reached, key=lambda node: len(paths[node]), default=-1)


def test_mass_passes_gradients_to_the_probabilities() -> None:
    probabilities = torch.tensor([[0.2, 0.3, 0.5]], requires_grad=True)
    trie = TokenTrie([(1,), (1, 2), (3,)])
    trie.node_mass(probabilities)[0, 0].backward()
    assert probabilities.grad is not None
    assert probabilities.grad.tolist() == [[1.0, 1.0, 0.0]]


def test_repeated_and_empty_entries_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"\[1, 2\] is given twice"):
        TokenTrie([(1, 2), (3,), (1, 2)])
    with pytest.raises(ShapeError, match="has no tokens"):
        TokenTrie([(1, 2), ()])


def test_a_wrong_number_of_probabilities_is_refused() -> None:
    with pytest.raises(ShapeError, match="2 probabilities for 3 entries"):
        TokenTrie([(1,), (2,), (3,)]).node_mass(torch.ones(1, 2))
