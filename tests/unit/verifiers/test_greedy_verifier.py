"""Greedy verification keeps exactly the path that plain argmax decoding would take."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ShapeError, UnsupportedFeatureError
from paceline.sampling import SamplingParameters
from paceline.sequence import Sequence, VerifyResult
from paceline.tree import DraftTree
from paceline.verifiers.greedy import GreedyVerifier

V = 6
token = st.integers(0, V - 1)
forests = st.lists(st.lists(st.lists(token, max_size=5), max_size=5), min_size=1, max_size=4)


def make_sequence(**parameters) -> Sequence:
    return Sequence([1], SamplingParameters(**parameters), frozenset(), 100, 0)


def verify(trees, logits) -> list[VerifyResult]:
    return GreedyVerifier().verify(trees, logits, [make_sequence() for _ in trees])


def rows_that_choose(choices) -> torch.Tensor:
    """Logits whose argmax per row is given."""
    return torch.nn.functional.one_hot(torch.tensor(choices), V).float()


def walk(tree: DraftTree, logits: torch.Tensor) -> VerifyResult:
    """Plain decoding: take the argmax, look for a child that carries it, repeat."""
    node, path = 0, []
    while True:
        chosen = int(logits[node].argmax())
        children = [
            n
            for n in range(1, len(tree))
            if int(tree.parents[n]) == node and int(tree.token_ids[n]) == chosen
        ]
        if not children:
            return VerifyResult(tuple(path), tuple(int(tree.token_ids[n]) for n in path), chosen)
        node = children[0]
        path.append(node)


@settings(deadline=None, max_examples=80)
@given(forests, st.integers(0, 2**31))
def test_batch_of_trees_is_walked_like_each_alone(forest, seed):
    trees = [DraftTree.from_paths(0, paths) for paths in forest]
    # Few distinct values, so that ties are common.
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, 3, (sum(map(len, trees)), V), generator=generator).float()
    parts = logits.split([len(tree) for tree in trees])
    assert verify(trees, logits) == [walk(tree, part) for tree, part in zip(trees, parts, strict=True)]


@pytest.mark.parametrize("wrong", range(6))
def test_wrong_draft_ends_the_path_where_it_stands(wrong):
    truth = [3, 1, 4, 1, 5, 2, 3]
    drafted = truth[:6]
    drafted[wrong] = 0
    (result,) = verify([DraftTree.from_chain(5, drafted)], rows_that_choose(truth))
    assert result == VerifyResult(tuple(range(1, wrong + 1)), tuple(truth[:wrong]), truth[wrong])


def test_fully_accepted_chain_gets_a_bonus_token():
    (result,) = verify([DraftTree.from_chain(5, [3, 1])], rows_that_choose([3, 1, 4]))
    assert result.emitted_ids == (3, 1, 4)


def test_root_alone_is_a_plain_step():
    (result,) = verify([DraftTree.root_only(5)], rows_that_choose([2]))
    assert result == VerifyResult((), (), 2)


def test_path_of_scattered_nodes_is_found():
    # Breadth-first with decoys: the true branch 1, 2, 3 sits at nodes 2, 4 and 7.
    tree = DraftTree(
        torch.tensor([5, 0, 1, 0, 2, 1, 0, 3]), torch.tensor([-1, 0, 0, 2, 2, 1, 4, 4]), torch.ones(8)
    )
    (result,) = verify([tree], rows_that_choose([1, 1, 2, 0, 3, 0, 0, 4]))
    assert result == VerifyResult((2, 4, 7), (1, 2, 3), 4)


def test_equal_logits_go_to_the_lowest_id():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0, 2.0, 0.0]])
    (result,) = verify([DraftTree.root_only(5)], logits)
    assert result.next_token_id == 1


def test_logits_are_not_changed():
    logits = rows_that_choose([1, 2])
    before = logits.clone()
    verify([DraftTree.from_chain(5, [1])], logits)
    assert torch.equal(logits, before)


def test_rows_must_match_the_nodes():
    with pytest.raises(ShapeError, match="3 rows of logits for 2 tree nodes"):
        verify([DraftTree.from_chain(5, [1])], torch.zeros(3, V))


def test_temperature_is_refused():
    verifier = GreedyVerifier()
    verifier.check(make_sequence())
    with pytest.raises(
        UnsupportedFeatureError, match=r"temperature 0\.7: use temperature 0, or verifier 'sampling'"
    ):
        verifier.check(make_sequence(temperature=0.7))
    assert verifier.lossless
