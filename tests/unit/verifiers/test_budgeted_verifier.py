"""Budgeted verification: the published rule on chains, the same rule on trees, one ledger for a request."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UnsupportedFeatureError
from paceline.kernels import build
from paceline.relaxation import Relaxation
from paceline.sampling import SamplingParameters
from paceline.sequence import Refusal, RelaxedToken, Sequence
from paceline.tree import DraftTree
from paceline.verifiers import budgeted
from paceline.verifiers.budgeted import BudgetedVerifier
from paceline.verifiers.budgeted_reference import best_path
from paceline.verifiers.greedy import GreedyVerifier

V = 6
EOS = 5
token = st.integers(0, V - 1)
forests = st.lists(st.lists(st.lists(token, max_size=9), max_size=6), min_size=1, max_size=4)
limits = st.builds(
    Relaxation,
    risk_budget=st.sampled_from([0.0, 0.5, 1.0, 3.0, 8.0]),
    risk_budget_per_token=st.sampled_from([0.0, 0.25]),
    max_regret_per_value=st.sampled_from([0.0, 0.1, 0.25, 0.5, 1e30, math.inf]),
    max_relaxed_tokens_per_block=st.integers(0, 4),
    value_horizon=st.integers(1, 8),
    is_value_normalised=st.booleans(),
    regret_price=st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.0]),
)


@pytest.fixture(scope="module", autouse=True, params=["arrays", "kernel"])
def _path(request):
    """Everything here holds for the array code and for the compiled kernel."""
    build.load_kernels()
    if request.param == "kernel":
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budgeted, "can_verify", lambda logits: False)
        yield


# The published rule: the longest path, whatever it costs.
limits_of = partial(Relaxation, regret_price=0.0)


def make_sequence(relaxation=None, *, spent=0.0, num_output=0, eos=frozenset(), **parameters) -> Sequence:
    asked = SamplingParameters(relaxation=relaxation or limits_of(), **parameters)
    return Sequence([1], asked, eos, 100, 0, output_ids=[0] * num_output, regret_spent=spent)


def random_logits(num_rows, seed) -> torch.Tensor:
    """Few distinct values, exact in binary, so that ties and full ledgers are common."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 7, (num_rows, V), generator=generator).float() / 4


def verify_one(tree, logits, sequence):
    return BudgetedVerifier().verify([tree], logits, [sequence])[0]


def chain_logits(*rows) -> torch.Tensor:
    """Logits of a chain: one row per node, the last for the token behind it."""
    return torch.tensor(rows, dtype=torch.float32)


@settings(deadline=None, max_examples=150)
@given(
    forests,
    limits,
    st.floats(0, 4),
    st.integers(0, 5),
    st.frozensets(token, max_size=1),
    st.integers(0, 2**31),
)
def test_agrees_with_the_reference_alone_and_in_batches(forest, own, spent, num_output, eos, seed):
    trees = [DraftTree.from_paths(0, paths) for paths in forest]
    logits = random_logits(sum(map(len, trees)), seed)
    logits[logits == 0] = -math.inf  # banned
    parts = logits.split([len(tree) for tree in trees])
    sequences = [make_sequence(own, spent=spent, num_output=num_output, eos=eos) for _ in trees]
    together = BudgetedVerifier().verify(trees, logits, sequences)
    for tree, part, sequence, result in zip(trees, parts, sequences, together, strict=True):
        remaining = own.allowance(num_output) - spent
        expected = best_path(tree, part.tolist(), own, remaining, eos)
        assert result.path == expected.nodes
        assert (result.charge, result.num_relaxed) == (expected.regret, expected.num_relaxed)
        end = expected.nodes[-1] if expected.nodes else 0
        assert result.next_token_id == int(part[end].argmax())
        assert result == verify_one(tree, part, sequence)


@settings(deadline=None, max_examples=100)
@given(
    forests,
    st.sampled_from(["risk_budget", "max_regret_per_value", "max_relaxed_tokens_per_block"]),
    st.integers(0, 2**31),
)
def test_without_budget_gate_or_tokens_it_is_greedy_ties_included(forest, name, seed):
    trees = [DraftTree.from_paths(0, paths) for paths in forest]
    logits = random_logits(sum(map(len, trees)), seed)
    own = limits_of(risk_budget=9.0, max_regret_per_value=1e30, max_relaxed_tokens_per_block=5)
    own = own.updated({name: 0})
    sequences = [make_sequence(own) for _ in trees]
    strict = GreedyVerifier().verify(trees, logits, sequences)
    found = BudgetedVerifier().verify(trees, logits, sequences)
    assert [(r.path, r.accepted_ids, r.next_token_id) for r in found] == [
        (r.path, r.accepted_ids, r.next_token_id) for r in strict
    ]
    assert all(r.num_relaxed == 0 and r.charge == 0 for r in found)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.lists(token, max_size=6), max_size=5), max_size=8), limits, st.integers(0, 2**31))
def test_a_request_never_spends_more_than_its_budget(rounds, own, seed):
    sequence = make_sequence(own, max_new_tokens=None)
    for number, paths in enumerate(rounds):
        tree = DraftTree.from_paths(sequence.last_token_id, paths)
        allowance = own.allowance(len(sequence.output_ids))
        strict = GreedyVerifier().verify([tree], random_logits(len(tree), seed + number), [sequence])[0]
        result = verify_one(tree, random_logits(len(tree), seed + number), sequence)
        assert len(result.path) >= len(strict.path)
        assert result.num_relaxed <= own.max_relaxed_tokens_per_block
        sequence.accept(result)
        assert sequence.regret_spent <= allowance + 1e-8


@settings(deadline=None, max_examples=80)
@given(forests, limits, st.floats(0, 4), st.integers(0, 2**31))
def test_a_larger_budget_never_gives_a_round_that_is_worth_less(forest, own, more, seed):
    """Without a price worth is length: a larger budget never makes a round shorter."""
    trees = [DraftTree.from_paths(0, paths) for paths in forest]
    logits = random_logits(sum(map(len, trees)), seed)
    larger = own.updated({"risk_budget": own.risk_budget + more})
    for limited, free in zip(
        BudgetedVerifier().verify(trees, logits, [make_sequence(own)] * len(trees)),
        BudgetedVerifier().verify(trees, logits, [make_sequence(larger)] * len(trees)),
        strict=True,
    ):
        worth = [len(r.path) - own.regret_price * r.charge for r in (limited, free)]
        assert worth[0] <= worth[1]


def test_the_published_rule_on_a_chain():
    """Values 3, 2, 1 with D = 3: regret 0.75 passes at the first token, 0.5 at the second, then no more."""
    tree = DraftTree.from_chain(0, [1, 1, 1])
    rows = [[0.75, 0, 0, 0, 0, 0], [0.5, 0, 0, 0, 0, 0], [0.5, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0]]
    own = limits_of(risk_budget=9, max_regret_per_value=0.25, max_relaxed_tokens_per_block=5, value_horizon=3)
    result = verify_one(tree, chain_logits(*rows), make_sequence(own))
    assert result.accepted_ids == (1, 1)
    assert result.next_token_id == 0
    assert result.relaxed == (RelaxedToken(0, 0.75), RelaxedToken(1, 0.5))
    assert result.refusal == Refusal("gate", 0.5, 1.0)


@pytest.mark.parametrize(
    ("changes", "num_kept", "reason"),
    [
        ({"risk_budget": 0.5}, 1, "budget"),
        ({"risk_budget": 1.0}, 2, "budget"),
        ({"max_relaxed_tokens_per_block": 1}, 1, "cap"),
        ({"max_regret_per_value": 0.08}, 1, "gate"),
        ({"max_regret_per_value": 0.05}, 0, "gate"),
        ({}, 3, "leaf"),
    ],
)
def test_says_what_ended_the_path(changes, num_kept, reason):
    tree = DraftTree.from_chain(0, [1, 1, 1])
    own = limits_of(risk_budget=9.0, max_relaxed_tokens_per_block=5).updated(changes)
    rows = [[0.5, 0, 0, 0, 0, 0]] * 4
    result = verify_one(tree, chain_logits(*rows), make_sequence(own))
    assert (len(result.path), result.refusal.reason) == (num_kept, reason)


def test_an_empty_ledger_still_lets_equal_logits_through():
    """As published for chains; without any budget at all even those are refused."""
    tree = DraftTree.from_chain(0, [1])
    rows = chain_logits([2, 2, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0])
    spent = make_sequence(limits_of(risk_budget=4.0), spent=4.0)
    assert verify_one(tree, rows, spent).relaxed == (RelaxedToken(0, 0.0),)
    assert verify_one(tree, rows, make_sequence(limits_of(risk_budget=0.0))).path == ()


def test_the_value_of_a_node_does_not_depend_on_the_tree():
    """A useless deep leaf must not loosen the gate: a token is judged alike in small and large trees."""
    own = limits_of(max_regret_per_value=0.25, value_horizon=2)
    small = DraftTree.from_chain(0, [1])
    deep = DraftTree.from_paths(0, [[1], [2, 2, 2, 2, 2, 2, 2]])
    row = [0.75, 0, -9, 0, 0, 0]
    assert verify_one(small, chain_logits(row, row), make_sequence(own)).path == ()
    assert verify_one(deep, chain_logits(*[row] * len(deep)), make_sequence(own)).path == ()


def test_nothing_is_relaxed_beyond_the_horizon():
    own = limits_of(value_horizon=1, max_regret_per_value=math.inf, risk_budget=math.inf)
    tree = DraftTree.from_chain(0, [1, 1])
    rows = [[0.5, 0, 0, 0, 0, 0]] * 3
    assert verify_one(tree, chain_logits(*rows), make_sequence(own)).accepted_ids == (1,)


def test_of_two_paths_as_long_the_one_with_less_regret_is_kept_then_the_first():
    own = limits_of(max_regret_per_value=1.0)
    logits = chain_logits([1.0, 0.5, 0.75, 0.75, 0, 0], *[[0, 0, 0, 0, 1, 0]] * 3)
    tree = DraftTree.from_paths(0, [[1], [2], [3]])
    result = verify_one(tree, logits, make_sequence(own))
    assert (result.accepted_ids, result.charge) == ((2,), 0.25)


@pytest.mark.parametrize("spent", [0.0, 8.0])
def test_of_equal_logits_the_targets_own_choice_is_kept(spent):
    """A tie costs no regret, so the argmax must win by being the argmax."""
    tree = DraftTree.from_paths(5, [[1], [0]])
    result = verify_one(
        tree, chain_logits([1, 1, 0, 0, 0, 0], *[[0, 0, 1, 0, 0, 0]] * 2), make_sequence(spent=spent)
    )
    assert (result.accepted_ids, result.num_relaxed) == ((0,), 0)


def test_a_longer_path_is_worth_its_regret():
    """Strict decoding keeps the argmax and finds nothing behind it; one relaxed token opens two more."""
    tree = DraftTree.from_paths(0, [[0], [1, 2, 3]])
    logits = torch.zeros(5, V)
    logits[0, 0], logits[0, 1] = 1.0, 0.5  # the argmax is 0, its node is a leaf
    logits[2, 2] = logits[3, 3] = logits[4, 4] = 1.0
    assert GreedyVerifier().verify([tree], logits, [make_sequence()])[0].accepted_ids == (0,)
    result = verify_one(tree, logits, make_sequence())
    assert (result.accepted_ids, result.next_token_id, result.charge) == ((1, 2, 3), 4, 0.5)


@pytest.mark.parametrize(("price", "kept", "reason"), [(1.9, 4, "leaf"), (2.1, 1, "price")])
def test_a_path_must_yield_what_its_regret_is_priced_at(price, kept, reason):
    """Strict decoding keeps one token; 1.5 logits of regret would bring three more."""
    tree = DraftTree.from_chain(0, [0, 1, 2, 3])
    rows = torch.zeros(5, V)
    rows[0, 0], rows[1, 4], rows[2, 2], rows[3, 3] = 1.0, 1.5, 1.0, 1.0
    own = limits_of(max_regret_per_value=1.0, regret_price=price)
    result = verify_one(tree, rows, make_sequence(own))
    assert (len(result.path), result.refusal.reason) == (kept, reason)


def test_a_dear_path_is_left_where_a_cheap_one_is_nearly_as_long():
    tree = DraftTree.from_paths(0, [[1, 1, 1], [2, 2]])
    rows = torch.zeros(6, V)
    rows[0, 0], rows[0, 1], rows[0, 2] = 1.5, 0.5, 1.25
    for parent, token_id in zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True):
        if parent > 0:
            rows[parent, token_id] = 1.0
    longest = verify_one(tree, rows, make_sequence())
    assert (longest.accepted_ids, longest.charge) == ((1, 1, 1), 1.0)
    priced = verify_one(tree, rows, make_sequence(limits_of(regret_price=1.5)))
    assert (priced.accepted_ids, priced.charge) == ((2, 2), 0.25)


def test_banned_tokens_are_never_kept():
    own = limits_of(risk_budget=math.inf, max_regret_per_value=math.inf)
    logits = torch.zeros(2, V)
    logits[0, 1] = -math.inf
    result = verify_one(DraftTree.from_chain(0, [1]), logits, make_sequence(own))
    assert result.path == ()
    assert result.refusal.reason == "banned"


@pytest.mark.parametrize(("drafted", "argmax"), [(EOS, 0), (0, EOS)])
def test_the_end_of_the_text_is_the_targets_alone(drafted, argmax):
    """Neither a drafted end that is not the argmax, nor a token where the argmax ends the text."""
    logits = torch.zeros(2, V)
    logits[0, argmax] = 0.25
    tree = DraftTree.from_chain(1, [drafted])
    guarded = make_sequence(eos=frozenset({EOS}))
    result = verify_one(tree, logits, guarded)
    assert (result.path, result.refusal.reason) == ((), "end_of_text")
    free = make_sequence(eos=frozenset({EOS}), ignore_eos=True)
    assert verify_one(tree, logits, free).accepted_ids == (drafted,)


def test_a_drafted_end_that_is_the_argmax_is_kept():
    logits = torch.zeros(2, V)
    logits[0, EOS] = 1.0
    result = verify_one(DraftTree.from_chain(1, [EOS]), logits, make_sequence(eos=frozenset({EOS})))
    assert result.accepted_ids == (EOS,)


def test_only_what_a_stop_leaves_is_charged():
    tree = DraftTree.from_chain(0, [1, 1])
    rows = [[0.5, 0, 0, 0, 0, 0]] * 3
    sequence = make_sequence(max_new_tokens=1)
    trimmed = sequence.accept(verify_one(tree, chain_logits(*rows), sequence))
    assert trimmed.relaxed == (RelaxedToken(0, 0.5),)
    assert trimmed.refusal is None, "a stop ended the path"
    assert (sequence.output_ids, sequence.regret_spent) == ([1], 0.5)


def test_what_a_stop_string_cuts_off_is_not_charged():
    tree = DraftTree.from_chain(0, [1, 1, 1])
    rows = [[0.5, 0, 0, 0, 0, 0]] * 4
    sequence = make_sequence(limits_of(max_relaxed_tokens_per_block=3))
    sequence.find_stop = lambda output_ids, num_before: 2
    sequence.accept(verify_one(tree, chain_logits(*rows), sequence))
    assert (sequence.output_ids, sequence.regret_spent) == ([1, 1], 1.0)


def test_the_ledger_lives_for_the_whole_request():
    tree = DraftTree.from_chain(0, [1])
    rows = chain_logits([0.75, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0])
    sequence = make_sequence(limits_of(risk_budget=2.0))
    spent = []
    for _ in range(4):
        sequence.accept(verify_one(tree, rows, sequence))
        spent.append(sequence.regret_spent)
    assert spent == [0.75, 1.5, 1.5, 1.5]


def test_requests_of_one_batch_have_their_own_limits():
    tree = DraftTree.from_chain(0, [1])
    rows = chain_logits([0.75, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0])
    sequences = [make_sequence(), make_sequence(limits_of(risk_budget=0.0)), make_sequence(spent=7.5)]
    results = BudgetedVerifier().verify([tree] * 3, torch.cat([rows] * 3), sequences)
    assert [result.num_relaxed for result in results] == [1, 0, 0]
    assert [result.refusal.reason for result in results] == ["leaf", "budget", "budget"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_regret_is_exact_in_every_dtype(dtype):
    rows = chain_logits([20.25, 20.0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]).to(dtype)
    result = verify_one(DraftTree.from_chain(0, [1]), rows, make_sequence())
    assert result.charge == float(rows[0, 0]) - float(rows[0, 1])


def test_logits_stay_as_they_are():
    rows = random_logits(4, 0)
    before = rows.clone()
    verify_one(DraftTree.from_chain(0, [1, 2, 3]), rows, make_sequence())
    assert torch.equal(rows, before)


def test_refuses_temperatures():
    with pytest.raises(UnsupportedFeatureError, match=r"verifier 'budgeted' cannot serve temperature 0\.7"):
        BudgetedVerifier().check(make_sequence(temperature=0.7))
    BudgetedVerifier().check(make_sequence())


def test_declares_itself_lossy_and_takes_an_empty_batch():
    assert not BudgetedVerifier.lossless
    assert BudgetedVerifier().verify([], torch.empty(0, V), []) == []


def test_normalised_values_are_fractions_of_the_horizon():
    own = limits_of(is_value_normalised=True, value_horizon=4, max_regret_per_value=0.6, risk_budget=9)
    tree = DraftTree.from_chain(0, [1, 1, 1])
    rows = [[0.5, 0, 0, 0, 0, 0], [0.25, 0, 0, 0, 0, 0], [0.5, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0]]
    result = verify_one(tree, chain_logits(*rows), make_sequence(own))
    assert result.accepted_ids == (1, 1)
    assert result.refusal == Refusal("gate", 0.5, 0.5)
    assert result.charge == 0.75
