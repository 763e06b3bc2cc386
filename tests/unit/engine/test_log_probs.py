"""Log-probabilities are the log-softmax of the rows given, with ids exact and alternatives best first."""

from __future__ import annotations

import pytest
import torch

from paceline.engine.log_probs import token_log_probs
from paceline.errors import ShapeError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_the_log_softmax_of_each_token_s_own_row(dtype):
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    ids = (7, 0, 49)
    expected = torch.log_softmax(logits.float(), dim=1)
    entries = token_log_probs(logits, ids, 2)
    assert [e.token_id for e in entries] == list(ids)
    for row, entry in enumerate(entries):
        assert entry.log_prob == expected[row, entry.token_id].item()
        best = expected[row].topk(2)
        assert entry.top == dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        assert list(entry.top.values()) == sorted(entry.top.values(), reverse=True)


def test_no_alternatives_are_reported_when_none_are_asked_for():
    (entry,) = token_log_probs(torch.zeros(1, 4), [2], 0)
    assert entry.top == {}
    assert entry.log_prob == pytest.approx(-1.3862944)


def test_more_alternatives_than_tokens_give_the_whole_vocabulary():
    (entry,) = token_log_probs(torch.zeros(1, 4), [2], 20)
    assert sorted(entry.top) == [0, 1, 2, 3]


def test_no_tokens_give_no_entries():
    assert token_log_probs(torch.zeros(0, 4), [], 2) == []


def test_rows_and_tokens_must_pair_up():
    with pytest.raises(ShapeError, match="2 rows of logits for 1 tokens"):
        token_log_probs(torch.zeros(2, 4), [1], 0)
