"""Scores of continuations against plain forwards over context and continuation: tiny models, fp32."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import RequestError
from paceline.integrations import continuations
from paceline.integrations.continuations import Continuation, score_continuations
from paceline.targets.huggingface import HuggingFaceTarget
from paceline.testing import TINY_VOCAB, tiny_model


def random_ids(length, seed):
    source = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, TINY_VOCAB, (length,), generator=source).tolist())


def multiple_choice(num_questions=5):
    """Questions behind the same examples; their continuations begin alike, end alike or hold another."""
    examples = random_ids(9, 0)
    for number in range(num_questions):
        question = (*examples, *random_ids(3 + number, number + 1))
        for tail in ((5,), (6,), (5, 6, 7), (5, 6, 8), (9, 10)):
            yield Continuation(question, tail)
    # The same input, split elsewhere.
    yield Continuation(examples, (7, 8))
    yield Continuation((*examples, 7), (9,))
    yield Continuation(examples, (7, 8))


@torch.no_grad()
def plain_score(model, continuation):
    ids = torch.tensor([[*continuation.context_ids, *continuation.token_ids]])
    rows = torch.log_softmax(model(input_ids=ids[:, :-1]).logits[0].double(), dim=-1)
    rows = rows[-len(continuation.token_ids) :]
    wanted = ids[0, -len(continuation.token_ids) :]
    is_greedy = bool((rows.argmax(dim=-1) == wanted).all())
    return float(rows.gather(1, wanted[:, None]).sum()), is_greedy


def assert_equal_scores(model, items, scores):
    for item, score in zip(items, scores, strict=True):
        log_prob, is_greedy = plain_score(model, item)
        assert score.log_prob == pytest.approx(log_prob, abs=1e-4)
        assert score.is_greedy == is_greedy


@pytest.mark.parametrize("num_lanes", [1, 3, 100])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "mistral-sliding", "gpt2"])
def test_scores_equal_those_of_a_plain_forward(target_of, architecture, num_lanes):
    target = target_of(architecture)
    items = list(multiple_choice())
    assert_equal_scores(target.model, items, score_continuations(target, items, num_lanes=num_lanes))


@pytest.mark.parametrize("num_lanes", [1, 2])
def test_long_inputs_are_read_in_pieces(target_of, monkeypatch, num_lanes):
    monkeypatch.setattr(continuations, "ROWS_PER_FORWARD", 7)
    target = target_of("llama")
    items = [Continuation(random_ids(length, length), random_ids(12, 3)) for length in (1, 6, 30, 31)]
    assert_equal_scores(target.model, items, score_continuations(target, items, num_lanes=num_lanes))


def test_fills_the_whole_context():
    model = tiny_model("gpt2-short")
    target = HuggingFaceTarget(model)
    items = [Continuation(random_ids(1, 1), random_ids(32, 2)), Continuation(random_ids(32, 3), (5,))]
    assert_equal_scores(model, items, score_continuations(target, items))
    with pytest.raises(RequestError, match="at most 33"):
        score_continuations(target, [Continuation(random_ids(32, 1), (5, 6))])


def test_greedy_continuations_are_found(target_of, oracle_of):
    answer = tuple(oracle_of("llama", (5, 6, 7, 8, 9), 6))
    items = [Continuation((5, 6, 7, 8, 9), answer), Continuation((5, 6, 7, 8, 9), (*answer[:-1], 3))]
    assert [score.is_greedy for score in score_continuations(target_of("llama"), items)] == [True, False]


def test_common_beginnings_are_read_once(target_of, monkeypatch):
    target = target_of("llama")
    rows = []
    forward = target.forward
    monkeypatch.setattr(
        target, "forward", lambda segments: rows.append(sum(map(len, segments))) or forward(segments)
    )
    question = random_ids(20, 1)
    score_continuations(target, [Continuation(question, tail) for tail in ((5,), (6,), (7,))])
    assert rows == [20]
    rows.clear()
    score_continuations(target, [Continuation(question, tail) for tail in ((5, 6), (7, 8))])
    # The question's last token is read again: its logits predict the first token of each.
    assert rows == [21, 2]


def test_progress_counts_every_continuation(target_of):
    counts = []
    items = list(multiple_choice())
    score_continuations(target_of("llama"), items, num_lanes=2, on_scored=counts.append)
    assert sum(counts) == len(items)


def test_leaves_no_cache_behind():
    target = HuggingFaceTarget(tiny_model("llama"))
    score_continuations(target, list(multiple_choice()), num_lanes=3)
    assert not target._slots

    def fail(number):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_continuations(target, list(multiple_choice()), num_lanes=3, on_scored=fail)
    assert not target._slots


def test_nothing_to_score_is_fine(target_of):
    assert score_continuations(target_of("llama"), []) == []


@pytest.mark.parametrize(("context_ids", "token_ids"), [((5,), (6, -1)), ((1_000_000,), (5,))])
def test_refuses_ids_that_are_none(target_of, context_ids, token_ids):
    with pytest.raises(RequestError, match=r"token id (-1|1000000) is not one of the target's, 0 to "):
        score_continuations(target_of("llama"), [Continuation(context_ids, token_ids)])


@pytest.mark.parametrize(("context_ids", "token_ids"), [((), (5,)), ((5,), ())])
def test_refuses_empty_texts(target_of, context_ids, token_ids):
    with pytest.raises(RequestError, match="at least one of each"):
        score_continuations(target_of("llama"), [Continuation(context_ids, token_ids)])
