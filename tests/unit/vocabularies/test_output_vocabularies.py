"""Full, static and speculated vocabularies: the same logits, fewer of them, and no mass made up."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import CheckpointError, ConfigError, ShapeError
from paceline.kernels import build
from paceline.kernels.ranking import CompiledRanking
from paceline.kernels.selection import log_sum_exp
from paceline.vocabularies.base import Candidates
from paceline.vocabularies.full import FullVocabulary
from paceline.vocabularies.output_layer import OutputLayer
from paceline.vocabularies.speculative import SpeculativeVocabulary, VocabularyRanking
from paceline.vocabularies.static import StaticVocabulary, frequent_ids, ids_from_offsets

V, D, M = 60, 16, 3


@pytest.fixture(scope="module", autouse=True)
def _kernels():
    build.load_kernels()


@pytest.fixture(params=["plain", "bias, scale and soft-cap"])
def layer(request) -> OutputLayer:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(V, D, generator=generator)
    if request.param == "plain":
        return OutputLayer(weight)
    return OutputLayer(weight, torch.randn(V, generator=generator), scale=0.5, soft_cap=3.0)


@pytest.fixture
def hidden() -> torch.Tensor:
    return torch.randn(M, D, generator=torch.Generator().manual_seed(1))


def ranking_of(seed=0, width=None) -> VocabularyRanking:
    torch.manual_seed(seed)
    return VocabularyRanking(D, V, width)


def test_full_logits_are_those_of_the_output_layer(layer, hidden):
    expected = hidden @ layer.weight.T
    if layer.bias is not None:
        expected = torch.tanh((expected + layer.bias) * 0.5 / 3.0) * 3.0
    found = FullVocabulary(layer).candidates(hidden)
    torch.testing.assert_close(found.logits, expected)
    torch.testing.assert_close(found.log_probs.exp().sum(-1), torch.ones(M))
    assert found.entry_ids is None


def test_a_faster_way_is_taken_where_no_gradient_is_wanted(layer, hidden):
    fast = OutputLayer(layer.weight, score_all=lambda states: torch.full((len(states), V), 7.0))
    assert bool((FullVocabulary(fast).candidates(hidden).logits == 7).all())
    states = hidden.clone().requires_grad_()
    fast.all_logits(states).sum().backward()
    torch.testing.assert_close(states.grad, layer.weight.sum(0).expand(M, D))


@settings(max_examples=30, deadline=None)
@given(st.sets(st.integers(0, V - 1), min_size=1))
def test_a_static_subset_has_the_logits_of_its_rows(ids):
    layer = OutputLayer(torch.randn(V, D, generator=torch.Generator().manual_seed(0)))
    hidden = torch.randn(M, D, generator=torch.Generator().manual_seed(1))
    chosen = torch.tensor(sorted(ids))
    vocabulary = StaticVocabulary.of_rows(layer, chosen, coverage=0.5)
    found = vocabulary.candidates(hidden)
    torch.testing.assert_close(found.logits, layer.all_logits(hidden)[:, chosen])
    # Half of the text is outside: what a softmax over the subset says is twice too much.
    torch.testing.assert_close(found.log_probs.exp().sum(-1), torch.full((M,), 0.5))
    assert torch.equal(ids_from_offsets(vocabulary.d2t, V), chosen)
    assert torch.equal(vocabulary.t2d.nonzero()[:, 0], chosen)
    assert (vocabulary.num_entries, vocabulary.num_candidates) == (V, len(ids))


def test_offsets_are_no_ids():
    """Row 51 of the public faults: d2t holds id minus number; a file of ids would shift every token."""
    assert ids_from_offsets(torch.tensor([0, 0, 3]), 6).tolist() == [0, 1, 5]
    with pytest.raises(CheckpointError, match="must hold offsets"):
        ids_from_offsets(torch.tensor([0, 1, 5]), 6)
    with pytest.raises(CheckpointError, match="must hold offsets"):
        ids_from_offsets(torch.tensor([2, 0]), 6)


@pytest.mark.parametrize(
    ("ids", "coverage", "error", "named"),
    [
        ([3, 3], 1.0, CheckpointError, "must be ascending"),
        ([3, 60], 1.0, CheckpointError, "ids 3 to 60"),
        ([1, 2, 3], 1.0, CheckpointError, "2 rows for 3 ids"),
        ([1, 2], 0.0, ConfigError, "coverage is 0.0"),
    ],
)
def test_damaged_static_vocabularies_are_refused(ids, coverage, error, named):
    with pytest.raises(error, match=named):
        StaticVocabulary(OutputLayer(torch.ones(2, D)), torch.tensor(ids), V, coverage)


def test_frequent_ids_hold_the_forced_ones_and_settle_ties_by_the_lowest():
    counts = torch.tensor([5, 0, 2, 2, 9, 2])
    found = frequent_ids(counts, 4, forced=[1])
    assert found.entry_ids.tolist() == [0, 1, 2, 4]
    assert found.coverage == pytest.approx(16 / 20)
    with pytest.raises(ConfigError, match="at least the 2 forced ones"):
        frequent_ids(counts, 1, forced=[1, 2])
    with pytest.raises(ConfigError, match="no token was counted"):
        frequent_ids(torch.zeros(6), 3)


@pytest.mark.parametrize("is_shared", [False, True], ids=["own candidates", "shared candidates"])
def test_with_all_entries_a_speculated_vocabulary_is_the_full_one(layer, hidden, is_shared):
    vocabulary = SpeculativeVocabulary(layer, ranking_of(), V, shares_candidates=is_shared)
    full, found = FullVocabulary(layer).candidates(hidden), vocabulary.candidates(hidden)
    torch.testing.assert_close(found.logits, full.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.log_normalizer, full.log_normalizer, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.best(5).entry_ids, full.best(5).entry_ids)


@pytest.mark.parametrize("is_shared", [False, True], ids=["own candidates", "shared candidates"])
def test_candidates_have_their_exact_logits(layer, hidden, is_shared):
    vocabulary = SpeculativeVocabulary(layer, ranking_of(), 9, shares_candidates=is_shared)
    found = vocabulary.candidates(hidden)
    ids = found.entry_ids
    assert not is_shared or torch.equal(ids, ids[:1].expand(M, 9))
    torch.testing.assert_close(found.logits, layer.all_logits(hidden).gather(1, ids), rtol=1e-5, atol=1e-5)
    assert bool((ids.diff(dim=1) > 0).all())
    ranked = vocabulary.ranking(hidden)
    if layer.bias is not None:
        ranked = ranked + layer.bias * layer.scale
    if not is_shared:
        assert torch.equal(ids, ranked.topk(9).indices.sort().values)
    best = found.best(2)
    for row in range(M):
        place = int(found.log_probs[row].argmax())
        assert int(best.entry_ids[row, 0]) == int(ids[row, place])


def test_a_ranking_that_knows_the_target_makes_up_no_mass(hidden):
    """Candidates are worth what they are worth over all entries, not over themselves."""
    layer = OutputLayer(torch.randn(V, D, generator=torch.Generator().manual_seed(0)))
    ranking = ranking_of(width=D)
    with torch.no_grad():
        ranking.down.weight.copy_(torch.eye(D))
        ranking.vocabulary.weight.copy_(layer.weight)
    full = FullVocabulary(layer).candidates(hidden)
    found = SpeculativeVocabulary(layer, ranking, 7).candidates(hidden)
    torch.testing.assert_close(found.log_normalizer, full.log_normalizer)
    assert torch.equal(found.best(7).entry_ids, full.best(7).entry_ids)
    assert bool((found.log_probs.exp().sum(-1) < 1).all())


def test_the_number_of_candidates_changes_at_run_time(layer, hidden):
    vocabulary = SpeculativeVocabulary(layer, ranking_of(), 4)
    assert vocabulary.candidates(hidden).logits.shape == (M, 4)
    vocabulary.num_candidates = 11
    assert vocabulary.candidates(hidden).logits.shape == (M, 11)
    for value in (0, V + 1):
        with pytest.raises(ConfigError, match=f"num_candidates is {value}"):
            vocabulary.num_candidates = value


def test_sizes_that_do_not_agree_are_refused(layer):
    with pytest.raises(ConfigError, match="the ranking has 61 entries, the output layer 60"):
        SpeculativeVocabulary(layer, VocabularyRanking(D, 61), 4)
    with pytest.raises(ConfigError, match="ranking width is 0"):
        VocabularyRanking(4, V)
    with pytest.raises(ShapeError, match="output layer: weight is"):
        OutputLayer(torch.ones(3, 4), torch.ones(4))


def test_best_entries_of_every_kind_of_ids():
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    for ids, expected in (
        (None, [1, 2]),
        (torch.tensor([4, 6, 9]), [6, 9]),
        (torch.tensor([[1, 3, 5]]), [3, 5]),
    ):
        best = Candidates(logits, ids, torch.tensor([math.log(4)])).best(2)
        assert best.entry_ids.tolist() == [expected]
        torch.testing.assert_close(best.log_probs, torch.tensor([[2.0, 1.0]]) - math.log(4))


def test_no_group_has_a_say_in_the_candidates_of_another(hidden):
    """States of two sequences at once choose what they choose alone; one that is no number harms itself."""
    layer = OutputLayer(torch.randn(V, D, generator=torch.Generator().manual_seed(0)))
    vocabulary = SpeculativeVocabulary(layer, ranking_of(), 9, shares_candidates=True)
    other = torch.randn(M, D, generator=torch.Generator().manual_seed(2))
    together = vocabulary.candidates(torch.cat([hidden, other]), 2)
    alone = [vocabulary.candidates(states) for states in (hidden, other)]
    assert torch.equal(together.entry_ids, torch.cat([own.entry_ids for own in alone]))
    torch.testing.assert_close(together.logits, torch.cat([own.logits for own in alone]))
    torch.testing.assert_close(together.log_normalizer, torch.cat([own.log_normalizer for own in alone]))
    broken = vocabulary.candidates(torch.cat([hidden, torch.full_like(other, torch.nan)]), 2)
    assert torch.equal(broken.entry_ids[:M], alone[0].entry_ids)
    torch.testing.assert_close(broken.log_probs[:M], alone[0].log_probs)
    assert bool(broken.log_probs[M:].isnan().all())


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_state_that_is_no_number_chooses_for_nobody_in_its_group(hidden, is_compiled, monkeypatch):
    monkeypatch.setattr(CompiledRanking, "is_available", lambda _: is_compiled)
    build.load_kernels()
    layer = OutputLayer(torch.randn(V, D, generator=torch.Generator().manual_seed(0)))
    vocabulary = SpeculativeVocabulary(layer, ranking_of(), 9, shares_candidates=True)
    wanted = vocabulary.candidates(hidden)
    broken = hidden.clone()
    broken[0] = torch.inf
    found = vocabulary.candidates(torch.cat([broken[:1], hidden]))
    assert torch.equal(found.entry_ids[1:], wanted.entry_ids)
    torch.testing.assert_close(found.log_probs[1:], wanted.log_probs)


def test_what_is_compiled_and_what_torch_does_agree(hidden, monkeypatch):
    build.load_kernels()
    generator = torch.Generator().manual_seed(0)
    layer = OutputLayer(torch.randn(V, D, generator=generator), torch.randn(V, generator=generator), 0.5)
    for is_shared in (False, True):
        found = []
        for is_compiled in (True, False):
            monkeypatch.setattr(CompiledRanking, "is_available", lambda _, own=is_compiled: own)
            vocabulary = SpeculativeVocabulary(layer, ranking_of(), 9, shares_candidates=is_shared)
            found.append(vocabulary.candidates(hidden))
        compiled, torch_made = found
        assert torch.equal(compiled.entry_ids, torch_made.entry_ids)
        torch.testing.assert_close(compiled.log_normalizer, torch_made.log_normalizer, rtol=1e-4, atol=1e-4)


def test_equal_logits_are_settled_by_the_lowest_id_and_no_number_comes_last():
    build.load_kernels()
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0], [torch.nan, 1.0, 2.0, 0.0]])
    best = Candidates(logits, None, log_sum_exp(logits)).best(3)
    assert best.entry_ids.tolist() == [[1, 2, 3], [2, 1, 3]]


def test_a_gradient_goes_through_the_mass(layer, hidden):
    """Whether kernels are loaded or not."""
    build.load_kernels()
    states = hidden.repeat(1, 1).requires_grad_()
    FullVocabulary(layer).candidates(states).log_normalizer.sum().backward()
    assert states.grad is not None
    assert bool((states.grad != 0).any())
