"""The compiled phrase drafter against the same arithmetic in torch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafters.compiled_phrase import CompiledPhrases
from paceline.drafters.phrase_trees import PhraseTrees
from paceline.heads.phrase import PhraseHead, PhraseHeadConfig
from paceline.kernels import build
from paceline.tree import DraftTree, check_tree
from paceline.vocabularies.trie import TokenTrie

token = st.integers(0, 6)
phrases = st.lists(st.lists(token, min_size=1, max_size=5).map(tuple), min_size=1, max_size=90, unique=True)


@pytest.fixture(scope="module", autouse=True)
def _kernels():
    build.load_kernels()


def make_head(num_entries: int, seed: int = 0, dtype: torch.dtype = torch.float32, **settings_) -> PhraseHead:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = PhraseHead(
            PhraseHeadConfig(num_entries=num_entries, **{"hidden_size": 32, "width": 16, **settings_})
        )
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.mul_(3).add_(0.1 * torch.randn_like(parameter))
    head.output.to(dtype)
    if head.ranking is not None:
        head.ranking.vocabulary.to(dtype)
    return head.eval().requires_grad_(False)


def in_torch(
    head: PhraseHead, trie: TokenTrie, entries, inputs: torch.Tensor, roots, max_nodes: int, **settings
):
    """The same arithmetic in torch, and the table of embeddings that both read."""
    return PhraseTrees(head, trie, entries, lambda ids: embeddings_of(head)[ids]).draft(
        inputs, roots, max_nodes, **settings
    )


def embeddings_of(head: PhraseHead) -> torch.Tensor:
    return torch.randn(7, head.config.hidden_size, generator=torch.Generator().manual_seed(9))


def assert_same_paths(ours: DraftTree, reference: DraftTree, tolerance: float) -> None:
    """Every path worth clearly more than the least kept one is in both trees, worth the same."""
    found, expected = (
        dict(zip(paths_of(tree), tree.node_values.tolist(), strict=True)) for tree in (ours, reference)
    )
    least = min(expected.values()) * (1 + 4 * tolerance) + 4 * tolerance
    clear = {path: value for path, value in expected.items() if value > least}
    assert {path: found.get(path) for path in clear} == pytest.approx(clear, rel=tolerance, abs=tolerance)


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    """Tokens from the root down to each node."""
    paths: list[tuple[int, ...]] = []
    for parent, token_id in zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token_id))
    return paths


def compiled_of(head: PhraseHead, trie: TokenTrie, entries) -> CompiledPhrases:
    compiled = CompiledPhrases.where_possible(head, trie, entries, embeddings_of(head))
    assert compiled is not None
    return compiled


@settings(max_examples=40, deadline=None)
@given(
    phrases,
    st.integers(1, 40),
    st.integers(1, 19),
    st.integers(0, 2**31),
    st.sampled_from([0.0, 0.4, 1.0]),
    st.booleans(),
)
def test_trees_are_those_of_torch(entries, max_nodes, num_rows, seed, chained, has_chains):
    """Any vocabulary size, any number of sequences and of nodes, one phrase or two."""
    num_chained = min(len(entries), math.ceil(chained * len(entries)))
    trie, head = TokenTrie(entries), make_head(len(entries), seed, chain_entries=num_chained)
    inputs = torch.randn(num_rows, 64, generator=torch.Generator().manual_seed(seed))
    roots = list(range(num_rows))
    compiled = compiled_of(head, trie, entries)
    # What the call before left in the buffers, with second phrases or without, has no effect.
    compiled.draft(inputs, roots, max_nodes, has_chains=not has_chains)
    drafted = compiled.draft(inputs, roots, max_nodes, has_chains=has_chains)
    expected = in_torch(head, trie, entries, inputs, roots, max_nodes, has_chains=has_chains)
    for ours, reference in zip(drafted, expected, strict=True):
        check_tree(ours)
        assert_same_paths(ours, reference, 1e-4)
        # Rounding may order two nodes of nearly equal worth either way, so worths are compared; and of what
        # is worth next to nothing it may leave a little or nothing.
        found, expected_values = (
            tree.node_values[tree.node_values > 1e-6].sort().values for tree in (ours, reference)
        )
        if abs(len(found) - len(expected_values)) == 0:
            torch.testing.assert_close(found, expected_values, rtol=1e-4, atol=1e-6)
        else:
            assert float(torch.cat([found, expected_values]).min()) < 2e-6
        for tree in (ours, reference):
            assert int(tree.token_ids[0]) == int(reference.token_ids[0])


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"depth": 1},
        {"depth": 3, "trunk_width": 48},
        {"inputs": ("hidden",)},
        {"feature_layers": (1, 4)},
        {"hidden_size": 48, "width": 80},
        {"chain_entries": 56},
        {"chain_entries": 20, "depth": 3, "hidden_size": 48, "width": 80},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_shape_of_head_is_computed(shape, dtype):
    entries = [(a, b) for a in range(7) for b in range(7)] + [(a,) for a in range(7)]
    trie, head = TokenTrie(entries), make_head(len(entries), dtype=dtype, **shape)
    width = head.config.num_inputs * head.config.hidden_size
    inputs = 20 * torch.randn(3, width, generator=torch.Generator().manual_seed(5))
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    drafted = compiled_of(head, trie, entries).draft(inputs, [1, 2, 3], 12)
    for ours, reference in zip(drafted, in_torch(head, trie, entries, inputs, [1, 2, 3], 12), strict=True):
        check_tree(ours)
        assert_same_paths(ours, reference, tolerance)
        torch.testing.assert_close(
            ours.node_values.sort().values,
            reference.node_values.sort().values,
            rtol=tolerance,
            atol=tolerance,
        )


RANKED = [(a, b) for a in range(7) for b in range(7)] + [(a,) for a in range(7)]


@pytest.mark.parametrize("num_candidates", [1, 20, 55, 56, 4000])
@pytest.mark.parametrize(
    "shape", [{}, {"chain_entries": 20, "hidden_size": 48, "width": 80, "ranking_width": 10}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_ranking_chooses_the_phrases_that_are_scored(num_candidates, shape, dtype):
    trie, head = TokenTrie(RANKED), make_head(len(RANKED), dtype=dtype, **{"ranking_width": 16, **shape})
    width = head.config.num_inputs * head.config.hidden_size
    inputs = 20 * torch.randn(3, width, generator=torch.Generator().manual_seed(5))
    compiled = CompiledPhrases.where_possible(head, trie, RANKED, embeddings_of(head), num_candidates)
    trees = PhraseTrees(head, trie, RANKED, lambda ids: embeddings_of(head)[ids], num_candidates)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    for ours, reference in zip(
        compiled.draft(inputs, [1, 2, 3], 12), trees.draft(inputs, [1, 2, 3], 12), strict=True
    ):
        check_tree(ours)
        assert_same_paths(ours, reference, tolerance)
        found, wanted = (
            tree.node_values[tree.node_values > 1e-5].sort().values for tree in (ours, reference)
        )
        if dtype is torch.float32:
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=1e-5)


def test_a_ranking_in_half_precision_works_without_kernels(monkeypatch):
    trie, head = TokenTrie(RANKED), make_head(len(RANKED), dtype=torch.bfloat16, ranking_width=16)
    monkeypatch.setattr(build, "_LOADED", {})
    trees = PhraseTrees(head, trie, RANKED, lambda ids: embeddings_of(head)[ids], 9)
    (tree,) = trees.draft(torch.randn(1, 64), [1], 12)
    check_tree(tree)
    assert tree.num_draft_tokens > 0


def test_a_ranking_of_all_phrases_leaves_the_drafts_as_they_are():
    trie, head = TokenTrie(RANKED), make_head(len(RANKED), ranking_width=16, chain_entries=20)
    plain = make_head(len(RANKED), chain_entries=20)
    plain.load_state_dict({n: t for n, t in head.state_dict().items() if not n.startswith("ranking.")})
    inputs = torch.randn(3, 64, generator=torch.Generator().manual_seed(5))
    drafted = compiled_of(head, trie, RANKED).draft(inputs, [1, 2, 3], 12)
    expected = compiled_of(plain, trie, RANKED).draft(inputs, [1, 2, 3], 12)
    for ours, reference in zip(drafted, expected, strict=True):
        assert_same_paths(ours, reference, 1e-4)


def test_what_is_not_scored_counts_as_the_ranking_says():
    """A softmax over the candidates alone would overstate them."""
    trie, head = TokenTrie(RANKED), make_head(len(RANKED), ranking_width=16)
    with torch.no_grad():
        # A ranking that says exactly what the head says.
        head.ranking.down.weight.copy_(torch.eye(16))
        head.ranking.vocabulary.weight.copy_(head.output.weight)
    inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(5))
    every = compiled_of(head, trie, RANKED).draft(inputs, [0] * 4, 200)
    compiled = CompiledPhrases.where_possible(head, trie, RANKED, None, 9)
    for full, part in zip(every, compiled.draft(inputs, [0] * 4, 200), strict=True):
        wanted = dict(zip(paths_of(full), full.node_values.tolist(), strict=True))
        for path, value in zip(paths_of(part)[1:], part.node_values.tolist()[1:], strict=True):
            assert value <= wanted[path] + 1e-4
            if path[1:] in RANKED and len(path) == 3:
                assert value == pytest.approx(wanted[path], abs=1e-4)


def test_several_threads_draft_what_one_drafts():
    """Rows and phrases are dealt out, and threads meet between the steps of a chain."""
    entries = [(a, b) for a in range(7) for b in range(7)] + [(a,) for a in range(7)]
    trie, head = TokenTrie(entries), make_head(len(entries), chain_entries=30)
    inputs = torch.randn(5, 64, generator=torch.Generator().manual_seed(5))
    before = torch.get_num_threads()
    trees = []
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        try:
            trees.append(compiled_of(head, trie, entries))
        finally:
            torch.set_num_threads(before)
    for _ in range(20):
        alone, together = (drafter.draft(inputs, [1] * 5, 20) for drafter in trees)
        for ours, reference in zip(together, alone, strict=True):
            assert torch.equal(ours.token_ids, reference.token_ids)
            assert torch.equal(ours.parents, reference.parents)
            assert torch.equal(ours.node_values, reference.node_values)


def test_what_the_kernels_do_not_take_stays_in_torch(monkeypatch):
    entries = [(1,), (2,)]
    trie = TokenTrie(entries)
    assert CompiledPhrases.where_possible(make_head(2, hidden_size=24), trie, entries) is None
    assert CompiledPhrases.where_possible(make_head(2, width=24), trie, entries) is None
    assert CompiledPhrases.where_possible(make_head(2, dtype=torch.float16), trie, entries) is None
    chained = make_head(2, chain_entries=2)
    assert CompiledPhrases.where_possible(chained, trie, entries, None) is None
    assert CompiledPhrases.where_possible(chained, trie, entries, embeddings_of(chained).half()) is None
    monkeypatch.setattr(build, "_LOADED", {})
    assert CompiledPhrases.where_possible(make_head(2), trie, entries) is None
