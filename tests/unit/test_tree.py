"""Draft trees: whatever builds or cuts one, the result is a tree that keeps its promises."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ShapeError
from paceline.tree import DraftTree, check_tree

ROOT = 9
token = st.integers(0, 5)
paths = st.lists(st.lists(token, max_size=6), max_size=6)
quick = settings(deadline=None, max_examples=80)


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    """Trees with values, from weighted candidate continuations."""
    candidates = draw(paths)
    weights = draw(st.lists(st.floats(0.01, 0.4), min_size=len(candidates), max_size=len(candidates)))
    return DraftTree.from_paths(ROOT, candidates, weights)


def texts(tree: DraftTree) -> list[tuple[int, ...]]:
    """Tokens from below the root down to every node."""
    found: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree)):
        found.append((*found[int(tree.parents[node])], int(tree.token_ids[node])))
    return found


def test_root_only_tree_drafts_nothing():
    tree = DraftTree.root_only(ROOT)
    check_tree(tree)
    assert len(tree) == 1
    assert tree.num_draft_tokens == 0
    assert tree.depths.tolist() == [0]
    assert tree.path_table.tolist() == [[0]]


@quick
@given(st.lists(token, max_size=8))
def test_chain_is_one_path(ids):
    tree = DraftTree.from_chain(ROOT, ids)
    check_tree(tree)
    assert tree.token_ids.tolist() == [ROOT, *ids]
    assert tree.depths.tolist() == list(range(len(ids) + 1))
    assert texts(tree)[-1] == tuple(ids)


def test_chain_values_never_rise():
    tree = DraftTree.from_chain(ROOT, [1, 2, 3], [0.5, 0.7, 0.2])
    assert tree.node_values.tolist() == pytest.approx([1.0, 0.5, 0.5, 0.2])


def test_chain_refuses_a_wrong_number_of_values():
    with pytest.raises(ShapeError, match="1 values for 2 drafted tokens"):
        DraftTree.from_chain(ROOT, [1, 2], [0.5])


@quick
@given(paths)
def test_merged_paths_share_every_prefix_once(candidates):
    tree = DraftTree.from_paths(ROOT, candidates)
    check_tree(tree)
    wanted = {tuple(path[:depth]) for path in candidates for depth in range(len(path) + 1)} | {()}
    assert sorted(texts(tree)) == sorted(wanted)


def test_merged_paths_add_up_their_worth():
    tree = DraftTree.from_paths(ROOT, [[1, 2], [1, 3], [4], [1, 2]], [0.2, 0.3, 0.1, 0.9])
    values = dict(zip(texts(tree), tree.node_values.tolist(), strict=True))
    assert values[(1,)] == 1.0  # 1.4, capped
    assert values[(1, 2)] == 1.0  # 1.1, capped
    assert values[(1, 3)] == pytest.approx(0.3)
    assert values[(4,)] == pytest.approx(0.1)


@quick
@given(trees())
def test_ancestors_depths_and_path_table_agree_with_walking_up(tree):
    parents = tree.parents.tolist()
    for node in range(len(tree)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        assert torch.nonzero(tree.ancestors[node])[:, 0].tolist() == sorted(path)
        assert int(tree.depths[node]) == len(path) - 1
        row = tree.path_table[node].tolist()
        assert row == path + [-1] * (len(row) - len(path))
    assert tree.path_table.shape[1] == int(tree.depths.max()) + 1


@quick
@given(trees(), st.integers(-1, 12))
def test_take_keeps_the_most_valuable_nodes_as_a_tree(tree, max_nodes):
    kept = tree.take(max_nodes)
    check_tree(kept)
    assert kept.num_draft_tokens == min(max(max_nodes, 0), tree.num_draft_tokens)
    assert set(texts(kept)) <= set(texts(tree))
    best = tree.node_values[1:].sort(descending=True).values[: kept.num_draft_tokens]
    assert torch.equal(kept.node_values[1:].sort(descending=True).values, best)


def test_take_prefers_parents_where_values_are_equal():
    tree = DraftTree.from_paths(ROOT, [[1, 2, 3], [4, 5]])
    assert texts(tree.take(2)) == [(), (1,), (1, 2)]


@quick
@given(trees(), st.integers(0, 6))
def test_illegal_tokens_go_with_everything_below_them(tree, vocab_size):
    kept = tree.without_tokens_from(vocab_size)
    check_tree(kept)
    assert texts(kept) == [t for t in texts(tree) if all(i < vocab_size for i in t)]
    assert int(kept.token_ids[0]) == ROOT


def test_negative_tokens_are_illegal():
    tree = DraftTree.from_paths(ROOT, [[-1, 2], [3]])
    assert texts(tree.without_tokens_from(10)) == [(), (3,)]


@quick
@given(trees(), st.integers(-1, 7))
def test_clamp_depth_drops_exactly_the_deeper_nodes(tree, max_depth):
    kept = tree.clamp_depth(max_depth)
    check_tree(kept)
    assert texts(kept) == [t for t in texts(tree) if len(t) <= max(max_depth, 0)]


@quick
@given(trees(), st.integers(0, 20), st.randoms(use_true_random=False))
def test_nodes_cut_out_of_a_static_trie_keep_their_texts(tree, max_nodes, random):
    chosen_tree = tree.take(max_nodes)
    trie_texts = texts(tree)[1:]
    chosen = [trie_texts.index(t) for t in texts(chosen_tree)[1:]]
    random.shuffle(chosen)
    cut = DraftTree.from_trie_mass(
        ROOT,
        tree.token_ids[1:],
        tree.parents[1:] - 1,
        tree.node_values[1:][chosen],
        torch.tensor(chosen, dtype=torch.int64),
    )
    check_tree(cut)
    assert set(texts(cut)) == set(texts(chosen_tree))
    values = dict(zip(texts(tree), tree.node_values.tolist(), strict=True))
    assert cut.node_values.tolist() == [values[t] for t in texts(cut)]


def test_levels_are_reranked_together():
    tree = DraftTree.from_topk(
        ROOT,
        [torch.tensor([1, 2]), torch.tensor([3, 4])],
        [torch.tensor([0.6, 0.3]).log(), torch.tensor([0.5, 0.1]).log()],
        [torch.tensor([0, 0]), torch.tensor([0, 1])],
        max_nodes=3,
    )
    check_tree(tree)
    assert set(texts(tree)) == {(), (1,), (2,), (1, 3)}
    assert tree.node_values.tolist() == pytest.approx([1.0, 0.6, 0.3, 0.5])


@pytest.mark.parametrize(
    ("tokens", "parents", "values", "message"),
    [
        ([9, 1], [-1], [1.0, 0.5], "shapes"),
        ([9, 1], [0, 0], [1.0, 0.5], "root's parent is 0"),
        ([9, 1], [-1, 1], [1.0, 0.5], "parent of node 1 is 1"),
        ([9, 1, 2], [-1, 0, 1], [1.0, 0.3, 0.5], "above its parent's"),
        ([9, 1, 1], [-1, 0, 0], [1.0, 0.5, 0.5], "repeats token 1 under parent 0"),
    ],
)
def test_check_tree_names_what_is_wrong(tokens, parents, values, message):
    with pytest.raises(ShapeError, match=message):
        check_tree(DraftTree(torch.tensor(tokens), torch.tensor(parents), torch.tensor(values)))


@quick
@given(trees(), trees())
def test_merged_trees_hold_the_texts_of_both_once(first, second):
    merged = first.merged(second)
    check_tree(merged)
    assert sorted(texts(merged)) == sorted(set(texts(first)) | set(texts(second)))
    own = dict(zip(texts(first), first.node_values.tolist(), strict=True))
    other = dict(zip(texts(second), second.node_values.tolist(), strict=True))
    for text, value in zip(texts(merged), merged.node_values.tolist(), strict=True):
        either = 1 - (1 - own.get(text, 0.0)) * (1 - other.get(text, 0.0))
        assert value == pytest.approx(either, abs=1e-5)


def test_trees_of_different_roots_are_not_merged():
    with pytest.raises(ShapeError, match="roots 1 and 2"):
        DraftTree.root_only(1).merged(DraftTree.from_chain(2, [3]))


@quick
@given(trees(), st.lists(token, max_size=6))
def test_num_matched_is_the_longest_prefix_in_the_tree(tree, ids):
    known = set(texts(tree))
    wanted = next((n for n in range(len(ids)) if tuple(ids[: n + 1]) not in known), len(ids))
    assert tree.num_matched(ids) == wanted


def test_other_values_leave_the_shape_and_the_source_alone():
    tree = DraftTree.from_paths(1, [[10, 11], [20]], [0.5, 0.4])
    depths, ancestors = tree.depths, tree.ancestors
    values = torch.tensor([1.0, 0.2, 0.1, 0.9])
    other = tree.with_values(values)
    assert other.depths is depths
    assert other.ancestors is ancestors
    assert torch.equal(other.node_values, values)
    assert torch.equal(tree.node_values, torch.tensor([1.0, 0.5, 0.5, 0.4]))
    assert other.take(1).token_ids.tolist() == [1, 20]
    assert other.take(1).depths.tolist() == [0, 1]
