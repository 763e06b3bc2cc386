"""Lossy acceptance: never shorter than exact, never more than the request's budget, off means exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

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
    limits = Relaxation(risk_budget=1e6, max_regret_per_value=1e6, regret_price=0.0).updated(strict)
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
    limits = Relaxation(risk_budget=budget, max_regret_per_value=1e6, regret_price=0.0)
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


@pytest.mark.parametrize("decoys", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_origins_are_true_under_penalties_and_an_end_of_text(
    target_of, generator_with, oracle_of, penalty, decoys
):
    """Row 39: spend and positions are reported; regret is of processed logits; ends are never relaxed."""
    written = oracle_of("llama", tuple(PROMPTS[2]), NUM_NEW)
    asked = replace(
        GREEDY,
        eos_token_ids=(written[25],),
        repetition_penalty=penalty,
        relaxation=Relaxation(risk_budget=20.0, max_regret_per_value=1e6, regret_price=0.0),
    )
    generator = generator_with("budgeted", 2, decoys)
    events = list(generator.stream(PROMPTS[2], asked))
    ids = [token_id for event in events for token_id in event.token_ids]
    origins = [origin for event in events for origin in event.origins]
    spent = 0.0
    for place, (token_id, origin) in enumerate(zip(ids, origins, strict=True)):
        history = [*PROMPTS[2], *ids[:place]]
        with torch.no_grad():
            row = target_of("llama").model(input_ids=torch.tensor([history])).logits[0, -1]
        seen = torch.tensor(sorted(set(history)))
        row[seen] = torch.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
        best = int(row.argmax())
        assert (origin == "relaxed") == (token_id != best)
        if origin == "relaxed":
            assert not {token_id, best} & set(asked.eos_token_ids)
            spent += float(row[best] - row[token_id])
    assert "relaxed" in origins
    assert events[-1].result.statistics.regret_spent == pytest.approx(spent, rel=1e-3)


def test_verifiers_of_all_kinds_share_one_batch(generator_with):
    """Row 39: a budget per request; each answer is what its request gets alone."""
    generator = generator_with("budgeted", 2, True)
    limits = [
        Relaxation(risk_budget=0.0),
        Relaxation(max_regret_per_value=1e6, regret_price=0.0),
        Relaxation(risk_budget=1.0),
    ]
    asked = [replace(GREEDY, relaxation=own) for own in limits]
    alone = [generator.generate(p, own).token_ids for p, own in zip(PROMPTS, asked, strict=True)]
    together = generator.generate_batch(list(PROMPTS), asked)
    assert [result.token_ids for result in together] == alone
    mixed = []
    for verifier, prompt, own in zip(("greedy", "budgeted", "margin"), PROMPTS, asked, strict=True):
        generator.verifier = verifier
        mixed.append(generator.open(list(prompt), own))
    for _ in generator.run(mixed):
        pass
    generator.verifier = "margin"
    assert tuple(mixed[0].sequence.output_ids) == alone[0]
    assert tuple(mixed[1].sequence.output_ids) == alone[1]
    assert tuple(mixed[2].sequence.output_ids) == generator.generate(PROMPTS[2], asked[2]).token_ids
