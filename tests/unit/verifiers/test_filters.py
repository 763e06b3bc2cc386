"""Filters equal Hugging Face's warpers on every row, whatever rows are beside it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from paceline.sampling import SamplingParameters
from paceline.verifiers import filters
from paceline.verifiers.filters import FilterParameters, filtered_weights

CPU = torch.device("cpu")
parameter_sets = st.builds(
    SamplingParameters,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 40, 2000]),
    top_p=st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.3, 1.0]),
)


def weights_of(logits, parameters) -> torch.Tensor:
    return filtered_weights(logits, FilterParameters.of(parameters, CPU))


def reference_law(row: torch.Tensor, parameters: SamplingParameters) -> torch.Tensor:
    """Probabilities by Hugging Face's warpers, in the order of `generate`."""
    scores = TemperatureLogitsWarper(parameters.temperature)(None, row[None])
    if parameters.top_k:
        scores = TopKLogitsWarper(parameters.top_k)(None, scores)
    if parameters.top_p < 1:
        scores = TopPLogitsWarper(parameters.top_p)(None, scores)
    scores = MinPLogitsWarper(parameters.min_p)(None, scores)
    return scores.softmax(dim=1)[0]


def random_logits(num_rows, vocab_size, seed, is_coarse=False) -> torch.Tensor:
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2
    return logits.bfloat16() if is_coarse else logits


@pytest.mark.parametrize("may_ask", [True, False], ids=["cpu-path", "accelerator-path"])
@settings(deadline=None, max_examples=100)
@given(
    st.lists(parameter_sets, min_size=1, max_size=3),
    st.sampled_from([3, 50, 1300]),
    st.integers(0, 10**6),
    st.booleans(),
)
def test_law_equals_hugging_face(may_ask, parameters, vocab_size, seed, is_coarse):
    logits = random_logits(len(parameters), vocab_size, seed, is_coarse)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filters, "is_asking_free", lambda device: may_ask)
        weights = weights_of(logits, parameters)
    for row, own, weight in zip(logits.float(), parameters, weights, strict=True):
        expected, law = reference_law(row, own), weight / weight.sum()
        if is_coarse:
            # Which of several equal logits stay at the border is left to the sort; how many is not.
            expected, law = expected.sort().values, law.sort().values
        assert torch.allclose(law, expected, atol=1e-6)


@settings(deadline=None, max_examples=50)
@given(st.lists(parameter_sets, min_size=2, max_size=4), st.integers(0, 10**6))
def test_row_does_not_depend_on_its_company(parameters, seed):
    logits = random_logits(len(parameters), 1300, seed)
    together = weights_of(logits, parameters)
    alone = [weights_of(logits[i : i + 1], [own])[0] for i, own in enumerate(parameters)]
    assert torch.equal(together, torch.stack(alone))


def test_ties_at_the_border_of_the_nucleus_keep_the_lowest_ids():
    weights = weights_of(torch.zeros(1, 4), [SamplingParameters(temperature=1.0, top_p=0.5)])
    assert weights[0].tolist() == [1, 1, 0, 0]


def test_ties_at_the_border_of_top_k_all_stay():
    logits = torch.tensor([[3.0, 1.0, 1.0, 0.0]])
    weights = weights_of(logits, [SamplingParameters(temperature=1.0, top_k=2)])
    assert (weights[0] > 0).tolist() == [True, True, True, False]


def test_more_ties_than_candidates_all_stay():
    logits = torch.zeros(1, 3 * filters.NARROW_WIDTH)
    weights = weights_of(logits, [SamplingParameters(temperature=1.0, top_k=2)])
    assert bool((weights == 1).all())


def test_banned_tokens_stay_impossible():
    logits = torch.tensor([[float("-inf"), 1.0, float("-inf"), 0.5]])
    for changes in ({}, {"top_k": 3}, {"top_p": 0.99}, {"min_p": 0.01}):
        weights = weights_of(logits, [SamplingParameters(temperature=1.0, **changes)])
        assert (weights[0] > 0).tolist() == [False, True, False, True]


def test_tiny_temperature_does_not_overflow():
    weights = weights_of(torch.tensor([[30.0, 29.0, -30.0]]), [SamplingParameters(temperature=1e-37)])
    assert weights[0].tolist() == [1, 0, 0]


def test_row_without_any_possible_token_is_zero():
    logits = torch.full((1, 4), float("-inf"))
    for changes in ({}, {"top_k": 3}, {"top_p": 0.9}):
        assert weights_of(logits, [SamplingParameters(temperature=1.0, **changes)])[0].tolist() == [0] * 4


def test_logits_are_not_changed():
    logits = random_logits(1, 50, 0)
    before = logits.clone()
    weights_of(logits, [SamplingParameters(temperature=1.0, top_k=3, top_p=0.9, min_p=0.1)])
    assert torch.equal(logits, before)
