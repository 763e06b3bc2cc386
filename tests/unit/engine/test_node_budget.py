"""The node budget: the rule itself, on made-up costs and values; nothing here is timed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine import forward_cost
from paceline.engine.cost_correction import MeasuredCost
from paceline.engine.forward_cost import ForwardCost
from paceline.engine.node_budget import (
    LEAST_ASKED,
    MAX_NODES,
    AdaptiveBudget,
    FixedBudget,
    _Grove,
    budget_of,
)
from paceline.engine.stats import RoundTiming
from paceline.errors import ConfigError
from paceline.sequence import VerifyResult
from paceline.targets.huggingface import HuggingFaceTarget
from paceline.testing import tiny_model
from paceline.tree import DraftTree

# 20 ms for one row, half a millisecond for each further one.
LINEAR = ForwardCost((1, 2, 128), (0.020, 0.0205, 0.0835))


def chain(*values: float) -> DraftTree:
    return DraftTree.from_chain(1, list(range(10, 10 + len(values))), values)


def finish(
    budget: AdaptiveBudget,
    trees: list[DraftTree],
    result: VerifyResult,
    draft_seconds: float = 0.003,
    slowness: float = 1.0,
    num_prompt_rows: int = 0,
) -> None:
    """End a round whose forward took `slowness` times what the table says."""
    num_rows = sum(map(len, trees))
    seconds = slowness * float(budget._cost.seconds(torch.tensor([num_rows]))[0])
    timing = RoundTiming(draft_seconds, seconds, 0.0, 0.0, len(trees), num_rows + num_prompt_rows)
    budget.observe(trees, [result] * len(trees), timing)


def accept(num_accepted: int) -> VerifyResult:
    path = tuple(range(1, num_accepted + 1))
    return VerifyResult(path, tuple(range(10, 10 + num_accepted)), 5)


def expected_rate(values: list[float], num_kept: int, num_sequences: int, draft_seconds: float) -> float:
    """The rule by hand."""
    tokens = num_sequences + sum(sorted(values, reverse=True)[:num_kept])
    rows = torch.tensor([num_sequences + num_kept])
    return tokens / (float(LINEAR.seconds(rows)[0]) + draft_seconds)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.floats(0.0, 1.0), min_size=0, max_size=12).map(lambda v: sorted(v, reverse=True)),
        min_size=1,
        max_size=4,
    )
)
def test_the_kept_number_has_the_highest_expected_rate(values):
    """No other number of nodes, taken by value over all trees, is expected to be faster."""
    trees = [chain(*own) for own in values]
    # Values pass through the tree as fp32.
    flat = [float(v) for tree in trees for v in tree.node_values[1:]]
    kept = sum(tree.num_draft_tokens for tree in AdaptiveBudget(LINEAR).prune(trees, 100.0))
    rates = [expected_rate(flat, k, len(trees), 0.0) for k in range(len(flat) + 1)]
    assert rates[kept] == pytest.approx(max(rates), rel=1e-6)


def test_a_batch_shares_the_budget_by_value():
    """The sure draft is kept long; the doubtful one is cut, whatever their order."""
    sure, doubtful = chain(0.99, 0.98, 0.97, 0.96), chain(0.05, 0.04, 0.03, 0.02)
    for trees, wanted in (([sure, doubtful], [4, 0]), ([doubtful, sure], [0, 4])):
        kept = AdaptiveBudget(LINEAR).prune(trees, 100.0)
        assert [tree.num_draft_tokens for tree in kept] == wanted


def test_padded_batches_are_charged_for_the_widest_tree():
    """Four sequences, one sure draft: each of its nodes costs four rows where rows are padded."""
    cost = ForwardCost((1, 2, 128), (0.020, 0.022, 0.274))
    trees = [chain(0.6, 0.5, 0.4), chain(), chain(), chain()]
    assert sum(t.num_draft_tokens for t in AdaptiveBudget(cost).prune(trees, 100.0)) == 3
    assert sum(t.num_draft_tokens for t in AdaptiveBudget(cost, pads=True).prune(trees, 100.0)) == 0
    even = [chain(0.9, 0.8)] * 4
    assert [t.num_draft_tokens for t in AdaptiveBudget(cost, pads=True).prune(even, 100.0)] == [2] * 4


def test_long_contexts_make_wide_forwards_dearer():
    """Attention of every row reads the whole cache."""
    cost = ForwardCost((1, 2, 64), (0.02, 0.0205, 0.05), 100, (0.03, 0.06, 2.0), 1100)
    tree = chain(0.6, 0.5)
    assert AdaptiveBudget(cost).prune([tree], 100.0)[0].num_draft_tokens == 2
    assert AdaptiveBudget(cost).prune([tree], 2100.0)[0].num_draft_tokens == 0


def test_flat_costs_keep_everything_and_steep_costs_nothing():
    flat = ForwardCost((1, 2, 64), (0.02, 0.02, 0.02))
    steep = ForwardCost((1, 2, 64), (0.02, 0.04, 1.28))
    tree = chain(0.5, 0.4, 0.3)
    assert AdaptiveBudget(flat).prune([tree], 100.0)[0].num_draft_tokens == 3
    assert AdaptiveBudget(steep).prune([tree], 100.0)[0].num_draft_tokens == 0


def test_a_boasting_drafter_is_believed_less_and_less_and_then_paused():
    """It claims certainty and is never right: soon it is asked once in many rounds."""
    budget = AdaptiveBudget(LINEAR)
    asked = wasted = 0
    for _ in range(1000):
        if budget.allot(1, 100.0) == 0:
            finish(budget, [chain()], accept(0), 1e-6)
            continue
        asked += 1
        trees = budget.prune([chain(0.99, 0.98, 0.97)], 100.0)
        wasted += trees[0].num_draft_tokens
        finish(budget, trees, accept(0))
    # 3 ms of drafting and half a millisecond a node, against 20 s of plain steps: within 5 % of plain.
    assert asked * 0.003 + wasted * 0.0005 < 0.05 * 1000 * 0.020
    assert 3 < asked < 100
    assert budget._draft_seconds.value == pytest.approx(0.003), "plain rounds say nothing of drafting"


def test_a_drafter_that_is_right_now_and_then_is_not_paused():
    """Nothing to offer in three rounds of four, and a long copy in the fourth: that pays on the whole."""
    budget = AdaptiveBudget(LINEAR)
    drafted = 0
    for number in range(400):
        assert budget.allot(1, 100.0) > 0
        copy = chain(0.9, 0.9, 0.9, 0.9) if number % 4 == 3 else chain()
        trees = budget.prune([copy], 100.0)
        kept = trees[0].num_draft_tokens
        drafted += kept > 0
        finish(budget, trees, accept(kept), 0.0005)
    assert drafted == 100


def test_as_many_nodes_are_asked_for_as_may_be_kept():
    """Few where few are kept; and when long drafts pay again, a few rounds later as many as ever."""
    budget = AdaptiveBudget(LINEAR)
    assert LEAST_ASKED < budget.allot(1, 100.0) < budget.max_nodes

    def round_of(tree: DraftTree) -> int:
        trees = budget.prune([tree], 100.0)
        finish(budget, trees, accept(trees[0].num_draft_tokens), 1e-6)
        return budget.allot(1, 100.0)

    for _ in range(100):
        asked = round_of(chain(0.9, 0.8))
    assert asked == LEAST_ASKED + 3
    rounds = 0
    while asked < budget.max_nodes:
        more = round_of(chain(*[0.99] * asked))
        assert more > asked
        asked, rounds = more, rounds + 1
    assert rounds <= 5


def test_a_drafter_that_becomes_good_is_found_again():
    budget = AdaptiveBudget(LINEAR)

    def run(num_rounds: int, num_accepted: int) -> int:
        drafted = 0
        for _ in range(num_rounds):
            nodes = budget.allot(1, 100.0)
            trees = budget.prune([chain(0.9, 0.8, 0.7)], 100.0) if nodes else [chain()]
            drafted += nodes > 0
            kept = min(num_accepted, trees[0].num_draft_tokens)
            finish(budget, trees, accept(kept), 0.003 if nodes else 1e-6)
        return drafted

    run(600, 0)
    run(1500, 3)
    assert run(100, 3) == 100


def test_slow_forwards_make_the_same_drafting_time_worth_less():
    """Five milliseconds of drafting are too much for a forward of 20, and little for one of 60."""

    def num_drafted(slowness: float) -> int:
        budget, count = AdaptiveBudget(LINEAR), 0
        for _ in range(200):
            nodes = budget.allot(1, 100.0)
            trees = budget.prune([chain(0.25)], 100.0) if nodes else [chain()]
            count += nodes > 0
            right = accept(trees[0].num_draft_tokens) if count % 4 == 0 else accept(0)
            finish(budget, trees, right, 0.005 if nodes else 1e-6, slowness)
        return count

    assert num_drafted(1.0) < 60
    assert num_drafted(3.0) > 180


def test_rows_that_turn_out_dear_are_not_drafted():
    """Half a millisecond a row was measured, and two are taken: fewer doubtful nodes are drafted."""
    budget = AdaptiveBudget(LINEAR)
    tree = chain(0.9, 0.1, 0.05)
    assert budget.prune([tree], 100.0)[0].num_draft_tokens == 3
    for number in range(60):
        budget.allot(1, 100.0)
        trees = budget.prune([tree.take(1 + number % 3)], 100.0)
        num_nodes = trees[0].num_draft_tokens
        timing = RoundTiming(0.0005, 0.020 + 0.002 * num_nodes, 0.0, 0.0, 1, num_nodes + 1)
        # Accepted about as often as claimed.
        depth = (1, 1, 3, 1, 1, 1, 1, 1, 1, 0)[number % 10]
        budget.observe(trees, [accept(min(num_nodes, depth))], timing)
        budget._pause = 0
    assert budget.prune([tree], 100.0)[0].num_draft_tokens < 3


def test_rounds_that_read_prompts_tell_nothing_about_the_table():
    budget = AdaptiveBudget(LINEAR)
    for _ in range(50):
        budget.allot(1, 100.0)
        finish(budget, budget.prune([chain(0.9)], 100.0), accept(1), 0.001, 9.0, num_prompt_rows=100)
    assert (budget._correction.base, budget._correction.slope) == (1.0, 1.0)


@pytest.mark.parametrize("num_prompt_rows", [0, 100])
def test_a_drafter_that_does_not_pay_is_paused_beside_prompts_too(num_prompt_rows):
    """Prompts may keep coming: forwards that read them must not be a shelter."""
    budget, num_asked = AdaptiveBudget(LINEAR), 0
    for _ in range(200):
        nodes = budget.allot(1, 100.0)
        num_asked += nodes > 0
        trees = budget.prune([chain(0.1)], 100.0) if nodes else [chain()]
        finish(budget, trees, accept(0), 0.02, num_prompt_rows=num_prompt_rows)
    assert num_asked < 40


def test_a_prompt_that_is_only_read_is_no_argument_against_the_drafter():
    """Nothing can be drafted before its last token is read."""
    budget = AdaptiveBudget(LINEAR)
    for _ in range(50):
        assert budget.allot(1, 100.0) > 0
        finish(budget, budget.prune([chain()], 100.0), accept(0), 0.001, num_prompt_rows=60)


def test_plain_rounds_are_compared_with_costs_at_their_own_length():
    """Long texts cost more: that is in the table, and no correction of it."""
    by_length = ForwardCost((1, 2, 128), (0.02, 0.0205, 0.0835), 128, (0.06, 0.0605, 0.1235), 1024)
    budget = AdaptiveBudget(by_length)
    budget.allot(1, 128.0)
    budget.prune([chain(0.5)], 128.0)
    budget._pause = 8
    for _ in range(8):
        assert budget.allot(1, 1024.0) == 0
        budget.observe([chain()], [accept(0)], RoundTiming(0.0, 0.06, 0.0, 0.0, 1, 1))
    assert budget._correction.base == pytest.approx(1.0)


def test_batches_of_changing_size_are_judged_by_the_time_that_they_save():
    """Each round is held against plain steps of its own size: small batches emit less, drafted or not."""
    budget = AdaptiveBudget(LINEAR)
    for num_sequences in (1, 1, 1, 2, 2, 8, 8, 8):
        assert budget.allot(num_sequences, 100.0) > 0
        trees = budget.prune([chain(0.9, 0.8)] * num_sequences, 100.0)
        finish(budget, trees, accept(trees[0].num_draft_tokens), 0.001)
    assert budget._pause == 0


@pytest.mark.parametrize(
    ("num_sequences", "gain", "is_paused"),
    [
        (1, 0.98, True),
        (1, 1.03, True),
        (1, 1.08, False),
        (16, 1.08, True),
        (16, 1.12, True),
        (16, 1.2, False),
    ],
)
def test_drafting_has_to_gain_more_than_it_may_be_wrong_by(num_sequences, gain, is_paused):
    """One free node that is accepted for sure: two tokens for the price of one; drafting takes the rest."""
    free = ForwardCost((1, 2, 64), (0.02, 0.02, 0.02))
    budget = AdaptiveBudget(free)
    draft_seconds = 2 * 0.02 / gain - 0.02
    for _ in range(8):
        if budget.allot(num_sequences, 100.0) == 0:
            break
        trees = budget.prune([chain(1.0)] * num_sequences, 100.0)
        timing = RoundTiming(draft_seconds, 0.02, 0.0, 0.0, num_sequences, sum(map(len, trees)))
        budget.observe(trees, [accept(1)] * num_sequences, timing)
    assert (budget._pause > 0) == is_paused


def test_plain_rounds_tell_what_a_plain_step_costs():
    """Drafts of one width alone cannot tell a dear step from dear rows; the end of a pause does."""
    budget = AdaptiveBudget(LINEAR)

    def rounds(count: int, **options: float) -> None:
        for _ in range(count):
            num_nodes = 8 if budget.allot(4, 100.0) else 0
            trees = [chain(*[0.5] * num_nodes)] * 4
            budget._pause = options.get("pause", budget._pause)
            if num_nodes:
                budget._measured = MeasuredCost(0.0215, 0.0005 * 32)
            seconds = 0.0215 * 1.5 + 0.0005 * num_nodes * 4
            timing = RoundTiming(0.001, seconds, 0.0, 0.0, 4, 4 + 4 * num_nodes)
            budget.observe(trees, [accept(0)] * 4, timing)

    budget.allot(4, 100.0)
    budget.prune([chain(0.5)] * 4, 100.0)
    rounds(20, pause=0)
    assert budget._correction.base < 1.4, "part of it is taken for the rows'"
    budget._pause = 40
    rounds(40)
    assert budget._correction.base == pytest.approx(1.5, rel=0.02)


def test_a_long_pause_leaves_most_of_what_was_learned_about_rows():
    budget = AdaptiveBudget(LINEAR)
    for number in range(60):
        budget.allot(1, 100.0)
        trees = budget.prune([chain(*[0.9] * (1 + number % 8))], 100.0)
        num_nodes = trees[0].num_draft_tokens
        timing = RoundTiming(0.001, 0.020 + 0.001 * num_nodes, 0.0, 0.0, 1, num_nodes + 1)
        budget.observe(trees, [accept(num_nodes)], timing)
        budget._pause = 0
    slope = budget._correction.slope
    assert slope > 1.6
    budget._pause = 256
    for _ in range(256):
        assert budget.allot(1, 100.0) == 0
        budget.observe([chain()], [accept(0)], RoundTiming(0.0, 0.020, 0.0, 0.0, 1, 1))
    assert budget._correction.slope > 0.9 * slope


def test_time_in_the_verifier_counts_as_time_of_the_forward():
    """On CUDA that is where a forward is waited for."""
    budget = AdaptiveBudget(LINEAR)
    budget.allot(1, 100.0)
    trees = budget.prune([chain()], 100.0)
    budget.observe(trees, [accept(0)], RoundTiming(0.001, 0.002, 0.038, 0.0, 1, 1))
    whole = AdaptiveBudget(LINEAR)
    whole.allot(1, 100.0)
    whole.observe(whole.prune([chain()], 100.0), [accept(0)], RoundTiming(0.001, 0.04, 0.0, 0.0, 1, 1))
    assert budget._correction.base == whole._correction.base > 1.5


def test_a_modest_drafter_is_believed_more():
    """It claims one in ten and is always right: its nodes are kept where they were not before."""
    costly = ForwardCost((1, 2, 64), (0.02, 0.026, 0.4))
    budget = AdaptiveBudget(costly)
    tree = chain(0.2)
    assert budget.prune([tree], 100.0)[0].num_draft_tokens == 0
    for _ in range(60):
        finish(budget, [tree], accept(1), 1e-6)
    budget._pause = 0
    assert budget.prune([tree], 100.0)[0].num_draft_tokens < 3


def test_corrected_trees_stay_trees():
    """A deep node never becomes worth more than the one above it, whatever was accepted."""
    budget = AdaptiveBudget(LINEAR)
    tree = DraftTree.from_paths(1, [[10, 11, 12], [10, 20], [30]], [0.5, 0.3, 0.2])
    deep = VerifyResult((1, 3), (10, 11), 9)
    for _ in range(50):
        finish(budget, [tree], deep)
    corrected = _Grove.of([tree], budget._factors).take(5)[0]
    assert len(corrected) == len(tree)
    above = corrected.node_values[corrected.parents[1:]]
    assert bool((corrected.node_values[1:] <= above + 1e-6).all())


def test_fixed_budgets_take_the_most_valuable_nodes():
    budget = FixedBudget(2)
    assert budget.allot(3, 100.0) == 2
    tree = DraftTree.from_paths(1, [[10, 11], [20]], [0.5, 0.4])
    assert budget.prune([tree], 100.0)[0].token_ids.tolist() == [1, 10, 11]


@pytest.mark.parametrize("width", [-1, "many", 1.5, True, ""])
def test_other_widths_are_refused(width):
    with pytest.raises(ConfigError, match=r"num_speculative_tokens is .*whole number"):
        budget_of(width, None)


@pytest.mark.parametrize("width", [0, 16, "8"])
def test_numbers_are_fixed_budgets(width):
    budget = budget_of(width, None)
    assert isinstance(budget, FixedBudget)
    assert budget.max_nodes == int(width)


def test_auto_measures_the_target(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(forward_cost, "is_busy", lambda: False)
    target = HuggingFaceTarget(tiny_model(), fingerprint="tiny")
    told: list[str] = []
    budget = budget_of("auto", target, told.append)
    assert isinstance(budget, AdaptiveBudget)
    assert budget.max_nodes == MAX_NODES
    assert len(told) == 1
    budget_of("auto", target, told.append)
    assert len(told) == 1, "the second time it is read from the cache"
