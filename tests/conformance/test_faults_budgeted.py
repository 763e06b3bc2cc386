"""Lossy acceptance: never shorter than exact, never more than the request's budget, off means exact."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conftest import PROMPTS
from paceline.engine.generator import Generator
from paceline.relaxation import Relaxation
from paceline.sampling import SamplingParameters
from paceline.testing import ReplayDrafter
from paceline.verifiers.greedy import GreedyVerifier

NUM_NEW = 40
GREEDY = SamplingParameters(max_new_tokens=NUM_NEW, eos_token_ids=())


@pytest.fixture
def generator_with(target_of, tokenizer, oracle_of):
    """A generator that drafts eight recorded tokens a round, one of them wrong."""

    def make(verifier, wrong, decoys):
        recorded = {tuple(p): oracle_of("llama", tuple(p), NUM_NEW) for p in PROMPTS}
        drafter = ReplayDrafter(recorded, 8, wrong=wrong, decoys=decoys)
        return Generator(target_of("llama"), tokenizer, drafter, verifier=verifier, num_speculative_tokens=32)

    return make


@pytest.mark.parametrize("decoys", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("wrong", [0, 3, 6])
@pytest.mark.parametrize(
    "strict",
    [{"risk_budget": 0.0}, {"max_regret_per_value": 0.0}, {"max_relaxed_tokens_per_block": 0}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_budget_of_nothing_is_exact(generator_with, oracle_of, strict, wrong, decoys):
    """Row 39: off is byte-identical, statistics of the rounds included."""
    limits = Relaxation(risk_budget=1e6, max_regret_per_value=1e6).updated(strict)
    lossy, exact = generator_with("budgeted", wrong, decoys), generator_with("greedy", wrong, decoys)
    for prompt in PROMPTS:
        found = lossy.generate(prompt, replace(GREEDY, relaxation=limits))
        expected = exact.generate(prompt, GREEDY)
        assert list(found.token_ids) == oracle_of("llama", tuple(prompt), NUM_NEW)
        assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
        assert found.statistics.num_rounds == expected.statistics.num_rounds
        assert found.statistics.accepted_per_position == expected.statistics.accepted_per_position
        assert found.statistics.num_relaxed_tokens == 0


@pytest.mark.parametrize("decoys", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("wrong", [0, 3, 6])
@pytest.mark.parametrize("budget", [0.4, 2.0, 50.0])
def test_a_request_spends_no_more_than_its_budget_and_accepts_no_less(
    generator_with, monkeypatch, budget, wrong, decoys
):
    """Row 39: spending is bounded over the whole request; no round is shorter than exact on its drafts."""
    generator = generator_with("budgeted", wrong, decoys)
    limits = Relaxation(risk_budget=budget, max_regret_per_value=1e6)
    answer = generator.open(PROMPTS[0], replace(GREEDY, relaxation=limits))
    sequence = answer.sequence
    verifier_of = generator.engine._verifiers["budgeted"]
    verify = verifier_of.verify
    spent, places = [], []

    def compare(trees, logits, sequences):
        results = verify(trees, logits, sequences)
        for own, exact in zip(results, GreedyVerifier().verify(trees, logits, sequences), strict=True):
            assert len(own.path) >= len(exact.path)
            places.extend(len(sequence.output_ids) + token.place for token in own.relaxed)
        return results

    monkeypatch.setattr(verifier_of, "verify", compare)
    for event in generator.run([answer]):
        spent.append(sequence.regret_spent)
        result = event.event.result
    assert spent == sorted(spent)
    assert spent[-1] <= budget + 1e-6
    assert result.statistics.regret_spent == pytest.approx(spent[-1])
    assert result.statistics.num_relaxed_tokens == len([place for place in places if place < NUM_NEW])
    assert places or budget < 1
