"""Prompt lookup drafts what followed last time, from exactly the committed tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafters.prompt_lookup import PromptLookupDrafter
from paceline.errors import ConfigError
from paceline.registry import drafter_class
from paceline.sampling import SamplingParameters
from paceline.sequence import Segment, Sequence, VerifyResult
from paceline.targets.base import TargetOutput
from paceline.tree import DraftTree, check_tree


def make_sequence(prompt, output=()) -> Sequence:
    return Sequence(list(prompt), SamplingParameters(), frozenset(), 1000, 0, output_ids=list(output))


def texts(tree: DraftTree) -> list[list[int]]:
    return [tree.token_ids[row[row >= 0]].tolist()[1:] for row in tree.path_table]


def emit(drafter, sequence, tree, path, next_token_id) -> None:
    """One round: the sequence accepts, then the drafter observes."""
    result = VerifyResult(tuple(path), tuple(tree.token_ids[list(path)].tolist()), next_token_id)
    trimmed = sequence.accept(result)
    output = TargetOutput(torch.zeros(len(tree), 1), {}, [Segment(sequence, (), tree)], lambda hidden: hidden)
    drafter.observe(output, [trimmed])


@pytest.mark.parametrize("prompt", [[5], [5, 6], [5, 6, 7]], ids=str)
def test_nothing_is_drafted_without_a_match(prompt):
    (tree,) = PromptLookupDrafter().propose([make_sequence(prompt)], 8)
    assert tree.num_draft_tokens == 0
    assert int(tree.token_ids[0]) == prompt[-1]


def test_sequences_without_a_match_may_sit_beside_one_with_a_match():
    sequences = [make_sequence([5]), make_sequence([1, 2, 3, 4, 1, 2, 3]), make_sequence([6, 7])]
    trees = PromptLookupDrafter().propose(sequences, 3)
    assert [tree.num_draft_tokens for tree in trees] == [0, 3, 0]
    assert texts(trees[1])[-1] == [4, 1, 2]


def test_continuations_of_several_matches_share_one_tree():
    sequence = make_sequence([1, 2, 3, 8, 8, 1, 2, 3, 9, 9, 1, 2, 3])
    (tree,) = PromptLookupDrafter().propose([sequence], 12)
    check_tree(tree)
    values = {tuple(text): value for text, value in zip(texts(tree), tree.node_values.tolist(), strict=True)}
    # Both continuations are there; the newer one is worth more.
    assert values[(9, 9)] > values[(8, 8)] > 0
    assert values[(9,)] > values[(9, 9)]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.integers(0, 12))
def test_proposals_are_small_enough_trees(prompt, max_nodes):
    (tree,) = PromptLookupDrafter().propose([make_sequence(prompt)], max_nodes)
    check_tree(tree)
    assert tree.num_draft_tokens <= max_nodes
    assert bool((tree.node_values <= 1).all())


def test_index_holds_prompt_and_emitted_tokens_and_nothing_else():
    drafter = PromptLookupDrafter()
    sequence = make_sequence([1, 2, 3, 4, 1, 2])
    for next_token_id in (7, 8, 7):
        (tree,) = drafter.propose([sequence], 8)
        path = [1] if tree.num_draft_tokens else []
        emit(drafter, sequence, tree, path, next_token_id)
        # A drafter that sees the committed text for the first time proposes the same.
        index = drafter._states[sequence].index
        assert index._token_ids == sequence.token_ids
        fresh = PromptLookupDrafter()
        fresh.propose([sequence], 8)
        assert fresh._states[sequence].index._ends == index._ends


def test_prompt_chunks_change_nothing():
    drafter, sequence = PromptLookupDrafter(), make_sequence([1, 2, 1])
    output = TargetOutput(torch.zeros(2, 1), {}, [Segment(sequence, (1, 2), None)], lambda hidden: hidden)
    drafter.observe(output, [None])
    (tree,) = drafter.propose([sequence], 2)
    assert texts(tree)[-1] == [2, 1]


def test_rejections_shorten_the_draft_and_successes_lengthen_it():
    loop = [1, 2, 3] * 4
    first_depths = [int(PromptLookupDrafter().propose([make_sequence(loop)], 64)[0].depths.max())]
    for is_right in (False, True):
        drafter, sequence = PromptLookupDrafter(), make_sequence(loop)
        for _ in range(12):
            (tree,) = drafter.propose([sequence], 64)
            longest = tree.path_table[int(tree.depths.argmax())].tolist()[1:]
            emit(drafter, sequence, tree, longest if is_right else [], 1 + len(sequence) % 3)
            if not is_right:
                sequence.output_ids += loop  # the same match again
        (tree,) = drafter.propose([sequence], 64)
        first_depths.append(int(tree.depths.max()))
    start, rejected, accepted = first_depths
    assert 1 <= rejected < start < accepted


def test_release_forgets_the_sequence():
    drafter, sequence = PromptLookupDrafter(), make_sequence([1, 1])
    drafter.propose([sequence], 4)
    drafter.release(sequence)
    drafter.release(sequence)
    assert drafter._states == {}


def test_head_is_refused(target_of):
    drafter = drafter_class("prompt_lookup")
    assert drafter.build(target_of(), None, 8).required_features == ()
    with pytest.raises(ConfigError, match="drafter 'prompt_lookup' has no trained head"):
        drafter.build(target_of(), Path("x"), 8)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"min_ngram_size": 0}, "n-gram sizes are 0 to 3"),
        ({"min_ngram_size": 4}, "n-gram sizes are 4 to 3"),
        ({"num_matches": 0}, "num_matches is 0"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(settings_, message):
    with pytest.raises(ConfigError, match=message):
        PromptLookupDrafter(**settings_)


def test_text_is_the_oracle_s_in_fewer_rounds(generator_of, oracle_of):
    prompt = (5, 6, 7, 8, 9)
    generator = generator_of("llama", PromptLookupDrafter())
    result = generator.generate(list(prompt), SamplingParameters(max_new_tokens=100))
    assert list(result.token_ids) == oracle_of("llama", prompt, 100)
    assert result.statistics.num_rounds < 100
    assert result.statistics.num_accepted_tokens == 100 - result.statistics.num_rounds
