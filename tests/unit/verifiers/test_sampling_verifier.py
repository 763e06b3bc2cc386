"""Sampling follows the target's law whatever is drafted, and a seed's text depends on nothing else."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest
import torch

from paceline.errors import ShapeError, UnsupportedFeatureError
from paceline.sampling import SamplingParameters
from paceline.sequence import Sequence, VerifyResult
from paceline.tree import DraftTree
from paceline.verifiers import filters, sampling
from paceline.verifiers.sampling import SamplingVerifier

N = 20000
V = 6
PLAIN = SamplingParameters(temperature=1.0)
# 99.9th percentiles of chi-square by degrees of freedom.
LIMITS = {1: 10.83, 2: 13.82, 3: 16.27}


def make_sequence(seed=0, prompt=(1,), parameters=PLAIN) -> Sequence:
    return Sequence(list(prompt), parameters, frozenset(), 1000, seed)


def check_law(counts: Counter, law: dict) -> None:
    """Chi-square test of counted outcomes; outcomes of probability 0 must not occur."""
    total = sum(counts.values())
    assert set(counts) <= {outcome for outcome, p in law.items() if p > 0}
    possible = {outcome: p for outcome, p in law.items() if p > 0}
    distance = sum((counts[o] - total * p) ** 2 / (total * p) for o, p in possible.items())
    assert distance < LIMITS[len(possible) - 1]


def verify_many(tree: DraftTree, rows: torch.Tensor, parameters=PLAIN) -> list[VerifyResult]:
    """The same tree and logits for N seeds, in one batch."""
    sequences = [make_sequence(seed, parameters=parameters) for seed in range(N)]
    return SamplingVerifier().verify([tree] * N, rows.repeat(N, 1), sequences)


LAW = {0: 0.5, 1: 0.3, 2: 0.2}


@pytest.mark.parametrize(
    ("drafted", "parameters", "law"),
    [
        ([[0]], PLAIN, LAW),
        ([[2]], PLAIN, LAW),
        ([[0], [1]], PLAIN, LAW),
        ([], PLAIN, LAW),
        ([[0]], SamplingParameters(temperature=1.0, top_k=2), {0: 0.625, 1: 0.375, 2: 0.0}),
        ([[0]], SamplingParameters(temperature=0.7), {0: 0.5707, 1: 0.2751, 2: 0.1542}),
        ([[0]], SamplingParameters(temperature=0.7, top_k=2), {0: 0.6747, 1: 0.3253, 2: 0.0}),
    ],
)
def test_first_token_follows_the_target_whatever_is_drafted(drafted, parameters, law):
    tree = DraftTree.from_paths(1, drafted)
    rows = torch.tensor([0.5, 0.3, 0.2]).log().expand(len(tree), 3)
    results = verify_many(tree, rows, parameters)
    check_law(Counter(result.emitted_ids[0] for result in results), law)
    for result in results:
        assert (len(result.path) == 1) == ([result.emitted_ids[0]] in drafted)


def test_prefix_held_by_many_leaves_is_not_favoured():
    a, b, c, d, e, f = range(6)
    tree = DraftTree.from_paths(1, [[a, b], [a, c], [a, d], [e, f]])
    law = torch.zeros(len(tree), 6)
    law[:, [a, e]] = 0.5
    after_a = int((tree.token_ids == a).nonzero()[-1])
    law[after_a] = torch.tensor([0.0, 0.5, 0.3, 0.2, 0.0, 0.0])
    results = verify_many(tree, law.log())
    check_law(Counter(result.emitted_ids[0] for result in results), {a: 0.5, e: 0.5})
    second = Counter(result.emitted_ids[1] for result in results if result.emitted_ids[0] == a)
    check_law(second, {b: 0.5, c: 0.3, d: 0.2})
    # After e the drafted f is impossible, so the walk ends there with the target's own token.
    assert all(len(r.path) == 1 for r in results if r.emitted_ids[0] == e)


def test_positions_of_one_block_use_different_numbers():
    tree = DraftTree.from_chain(1, [0, 0])
    results = verify_many(tree, torch.tensor([0.5, 0.5]).log().expand(3, 2))
    check_law(
        Counter(r.emitted_ids for r in results if len(r.emitted_ids) == 3), {(0, 0, 0): 0.5, (0, 0, 1): 0.5}
    )
    check_law(Counter(min(len(r.path), 2) for r in results), {0: 0.5, 1: 0.25, 2: 0.25})


class StubTarget:
    """A language model that is a hash of the prefix."""

    def row(self, ids) -> torch.Tensor:
        digest = hashlib.sha256(bytes(ids)).digest()
        return torch.tensor([byte / 64 for byte in digest[:V]])

    def rows(self, sequence: Sequence, tree: DraftTree) -> torch.Tensor:
        paths = [tree.token_ids[row[row >= 0]].tolist()[1:] for row in tree.path_table]
        return torch.stack([self.row(sequence.token_ids + path) for path in paths])


def no_draft(sequence, truth):
    return []


def everything(sequence, truth):
    return [[i, j] for i in range(V) for j in range(V)]


def right_chain(sequence, truth):
    return [truth[len(sequence.output_ids) :][:4]]


def wrong_chain(sequence, truth):
    return [[(i + 1) % V for i in truth[len(sequence.output_ids) :][:4]]]


def decode(sequences, draft, truths, num_tokens=24) -> list[list[int]]:
    """Decode a batch of stub sequences with one way of drafting."""
    target, verifier = StubTarget(), SamplingVerifier()
    while running := [i for i, s in enumerate(sequences) if len(s.output_ids) < num_tokens]:
        batch = [sequences[i] for i in running]
        trees = [DraftTree.from_paths(s.last_token_id, draft(s, truths[i])) for i, s in zip(running, batch)]
        logits = torch.cat([target.rows(s, tree) for s, tree in zip(batch, trees, strict=True)])
        for sequence, result in zip(batch, verifier.verify(trees, logits, batch), strict=True):
            sequence.accept(result)
    return [sequence.output_ids[:num_tokens] for sequence in sequences]


@pytest.mark.parametrize("may_ask", [True, False], ids=["cpu-path", "accelerator-path"])
@pytest.mark.parametrize("draft", [no_draft, everything, right_chain, wrong_chain], ids=lambda d: d.__name__)
def test_seed_gives_the_same_text_with_any_draft_and_company(draft, may_ask, monkeypatch):
    monkeypatch.setattr(filters, "is_asking_free", lambda device: may_ask)
    monkeypatch.setattr(sampling, "is_asking_free", lambda device: may_ask)
    requests = [
        (42, (1,), PLAIN),
        (42, (1, 2), SamplingParameters(temperature=0.7, top_k=3)),
        (43, (1,), SamplingParameters(temperature=1.3, top_p=0.8)),
        (44, (3, 4, 5), SamplingParameters(temperature=1.0, min_p=0.2)),
    ]
    alone = [decode([make_sequence(*request)], no_draft, [[]])[0] for request in requests]
    together = decode([make_sequence(*request) for request in requests], draft, alone)
    assert together == alone


def test_right_drafts_are_accepted_whole():
    truth = decode([make_sequence(7)], no_draft, [[]], 6)[0]
    sequence = make_sequence(7)
    tree = DraftTree.from_chain(1, truth[:5])
    (result,) = SamplingVerifier().verify([tree], StubTarget().rows(sequence, tree), [sequence])
    assert result == VerifyResult((1, 2, 3, 4, 5), tuple(truth[:5]), truth[5])


def test_seeds_give_different_texts():
    texts = {tuple(decode([make_sequence(seed)], no_draft, [[]])[0]) for seed in range(10)}
    assert len(texts) == 10


def test_global_generator_is_neither_read_nor_advanced():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = decode([make_sequence(42)], no_draft, [[]])
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    assert decode([make_sequence(42)], no_draft, [[]]) == first


def test_logits_are_not_changed():
    logits = torch.randn(2, V, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    parameters = SamplingParameters(temperature=0.5, top_k=2, top_p=0.9, min_p=0.1)
    SamplingVerifier().verify([DraftTree.from_chain(1, [0])], logits, [make_sequence(parameters=parameters)])
    assert torch.equal(logits, before)


def test_all_tokens_banned_gives_what_argmax_gives():
    logits = torch.full((1, V), float("-inf"))
    (result,) = SamplingVerifier().verify([DraftTree.root_only(1)], logits, [make_sequence()])
    assert result.next_token_id == 0


def test_empty_batch_is_fine():
    assert SamplingVerifier().verify([], torch.zeros(0, V), []) == []


def test_rows_must_match_the_nodes():
    with pytest.raises(ShapeError, match="1 rows of logits for 2 tree nodes"):
        SamplingVerifier().verify([DraftTree.from_chain(1, [0])], torch.zeros(1, V), [make_sequence()])


def test_temperature_zero_is_refused():
    verifier = SamplingVerifier()
    verifier.check(make_sequence())
    with pytest.raises(UnsupportedFeatureError, match="temperature 0: use a temperature above 0"):
        verifier.check(make_sequence(parameters=SamplingParameters()))
    assert verifier.lossless
