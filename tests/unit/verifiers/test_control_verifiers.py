"""The rules that budgeted verification is compared with: a fixed margin, and typical acceptance."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UnsupportedFeatureError
from paceline.registry import verifier_class
from paceline.relaxation import Relaxation
from paceline.sampling import SamplingParameters
from paceline.sequence import Sequence
from paceline.tree import DraftTree
from paceline.verifiers.greedy import GreedyVerifier
from paceline.verifiers.margin import MarginVerifier
from paceline.verifiers.typical import TypicalVerifier

V = 5
token = st.integers(0, V - 1)
forests = st.lists(st.lists(st.lists(token, max_size=5), max_size=5), min_size=1, max_size=4)


def make_sequence(eos=frozenset(), temperature=0.0, **limits) -> Sequence:
    asked = SamplingParameters(relaxation=Relaxation(**limits), temperature=temperature)
    return Sequence([1], asked, eos, 100, 0)


def is_kept(verifier, tree, logits, sequence, node) -> bool:
    """What the rule says of one node that is not the argmax, computed on its own."""
    row = logits[int(tree.parents[node])].double()
    own = row[int(tree.token_ids[node])]
    if isinstance(verifier, MarginVerifier):
        margin = sequence.parameters.relaxation.max_regret
        return margin > 0 and float(row.max() - own) <= margin
    probabilities = torch.softmax(row, 0)
    entropy = -float((probabilities * probabilities.log()).sum())
    limits = sequence.parameters.relaxation
    threshold = min(limits.typical_epsilon, limits.typical_delta * math.exp(-entropy))
    return float(probabilities[int(tree.token_ids[node])]) > threshold


def longest_kept(verifier, tree, logits, sequence) -> int:
    """Depth of the deepest node above which nothing is refused."""
    depths = [0] * len(tree)
    reached = [True] + [False] * (len(tree) - 1)
    for node in range(1, len(tree)):
        parent = int(tree.parents[node])
        is_choice = int(logits[parent].argmax()) == int(tree.token_ids[node])
        depths[node] = depths[parent] + 1
        reached[node] = reached[parent] and (is_choice or is_kept(verifier, tree, logits, sequence, node))
    return max(depth for depth, ok in zip(depths, reached, strict=True) if ok)


@pytest.mark.parametrize("verifier", [MarginVerifier(), TypicalVerifier()], ids=["margin", "typical"])
@settings(deadline=None, max_examples=80)
@given(forest=forests, amount=st.sampled_from([0.0, 0.05, 0.3, 1.1]), seed=st.integers(0, 2**31))
def test_keeps_the_longest_path_that_the_rule_allows(verifier, forest, amount, seed):
    trees = [DraftTree.from_paths(0, paths) for paths in forest]
    generator = torch.Generator().manual_seed(seed)
    # Odd steps: no threshold is met exactly, where rounding would decide.
    logits = torch.randint(0, 8, (sum(map(len, trees)), V), generator=generator) * 0.317
    parts = logits.split([len(tree) for tree in trees])
    sequences = [make_sequence(max_regret=amount, typical_delta=amount) for _ in trees]
    results = verifier.verify(trees, logits, sequences)
    for tree, part, sequence, result in zip(trees, parts, sequences, results, strict=True):
        assert len(result.path) == longest_kept(verifier, tree, part, sequence)
        assert result.next_token_id == int(part[result.rows[-1]].argmax())


@settings(deadline=None, max_examples=40)
@given(forests, st.integers(0, 2**31))
def test_a_margin_of_zero_is_greedy_ties_included(forest, seed):
    trees = [DraftTree.from_paths(0, paths) for paths in forest]
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, 3, (sum(map(len, trees)), V), generator=generator).float()
    sequences = [make_sequence(max_regret=0.0) for _ in trees]
    found = MarginVerifier().verify(trees, logits, sequences)
    strict = GreedyVerifier().verify(trees, logits, sequences)
    assert [result.path for result in found] == [result.path for result in strict]


def test_typical_keeps_more_where_the_target_is_undecided():
    """The same probability 0.2: too little beside 0.8, enough among five equals."""
    tree = DraftTree.from_chain(0, [1])
    behind = torch.zeros(V)
    decided = torch.tensor([0.8, 0.2, 1e-9, 1e-9, 1e-9]).log()
    undecided = torch.tensor([0.2001, 0.2, 0.2, 0.2, 0.1999]).log()
    sequence = make_sequence(typical_epsilon=0.5, typical_delta=0.9)
    for row, num_kept in ((decided, 0), (undecided, 1)):
        result = TypicalVerifier().verify([tree], torch.stack([row, behind]), [sequence])[0]
        assert len(result.path) == num_kept


@pytest.mark.parametrize("name", ["margin", "typical"])
def test_controls_guard_the_end_of_the_text_and_say_what_refused(name):
    verifier = verifier_class(name)()
    tree = DraftTree.from_chain(0, [1])
    logits = torch.tensor([[0.5, 0.4, 0, 0, 0], [1.0, 0, 0, 0, 0]])
    asked = {"max_regret": 0.3, "typical_epsilon": 0.01}
    assert verifier.verify([tree], logits, [make_sequence(**asked)])[0].num_relaxed == 1
    guarded = verifier.verify([tree], logits, [make_sequence(eos=frozenset({0}), **asked)])[0]
    assert guarded.refusal.reason == "end_of_text"
    strict = {"max_regret": 0.01, "typical_epsilon": 0.9, "typical_delta": 9.0}
    assert verifier.verify([tree], logits, [make_sequence(**strict)])[0].refusal.reason == "threshold"
    leaf = verifier.verify([DraftTree.root_only(0)], logits[:1], [make_sequence()])[0].refusal
    assert leaf.reason == "leaf"


@pytest.mark.parametrize("name", ["margin", "typical"])
def test_controls_are_lossy_and_refuse_temperatures(name):
    verifier = verifier_class(name)()
    assert not verifier.lossless
    with pytest.raises(UnsupportedFeatureError, match=f"verifier '{name}' cannot serve temperature 0.5"):
        verifier.check(make_sequence(temperature=0.5))
