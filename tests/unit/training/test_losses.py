from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import ConfigError
from paceline.training.losses import LOSSES, PhraseLoss, path_nodes
from paceline.vocabularies.trie import TokenTrie

ENTRIES = [(1,), (1, 2), (1, 2, 3), (1, 4), (5, 6, 7), (5,), (8,), (8, 9), (1, 2, 3, 4)]


def beneath(trie: TokenTrie, node: int) -> list[int]:
    """Entries whose path goes through a node, the slow way."""
    found = []
    for entry, end in enumerate(trie.entry_nodes.tolist()):
        current = end
        while current >= 0:
            if current == node:
                found.append(entry)
            current = int(trie.parents[current])
    return found


def reference(kind: str, trie: TokenTrie, scores: Tensor, entries: Tensor, nodes: Tensor) -> Tensor:
    log_probs = scores.log_softmax(-1)
    losses = []
    for row in range(len(scores)):
        if kind == "longest":
            losses.append(-log_probs[row, entries[row]])
            continue
        path = [int(nodes[row])]
        while int(trie.parents[path[-1]]) >= 0:
            path.append(int(trie.parents[path[-1]]))
        chosen = path[:1] if kind == "mass" else path
        masses = [-torch.logsumexp(log_probs[row, beneath(trie, node)], 0) for node in chosen]
        losses.append(torch.stack(masses).mean())
    return torch.stack(losses).mean()


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(LOSSES), st.integers(0, 10_000), st.integers(1, 12))
def test_equals_the_slow_definition_with_its_gradient(kind: str, seed: int, count: int) -> None:
    trie = TokenTrie(ENTRIES)
    generator = torch.Generator().manual_seed(seed)
    scores = (torch.randn(count, len(ENTRIES), generator=generator) * 5).requires_grad_()
    entries = torch.randint(0, len(ENTRIES), (count,), generator=generator)
    nodes = torch.randint(0, len(trie), (count,), generator=generator)
    loss = PhraseLoss(kind, trie)(scores, entries, nodes)
    expected = reference(kind, trie, scores, entries, nodes)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    mine = torch.autograd.grad(loss, scores, retain_graph=True)[0]
    torch.testing.assert_close(mine, torch.autograd.grad(expected, scores)[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", LOSSES)
def test_batch_without_samples_is_zero_and_never_nan(kind: str) -> None:
    trie = TokenTrie(ENTRIES)
    scores = torch.zeros(0, len(ENTRIES), requires_grad=True)
    loss = PhraseLoss(kind, trie)(scores, torch.zeros(0).long(), torch.zeros(0).long())
    loss.backward()
    assert loss.item() == 0.0


@pytest.mark.parametrize("kind", LOSSES)
def test_extreme_scores_stay_finite(kind: str) -> None:
    trie = TokenTrie(ENTRIES)
    scores = torch.full((2, len(ENTRIES)), -1e4)
    scores[:, 4] = 1e4
    scores.requires_grad_()
    loss = PhraseLoss(kind, trie)(scores, torch.tensor([0, 4]), trie.entry_nodes[torch.tensor([2, 4])])
    loss.backward()
    assert torch.isfinite(loss)
    assert scores.grad is not None
    assert torch.isfinite(scores.grad).all()


def test_paths_hold_every_node_down_to_the_given_one() -> None:
    trie = TokenTrie(ENTRIES)
    deep, shallow = int(trie.entry_nodes[8]), int(trie.entry_nodes[6])
    samples, nodes = path_nodes(trie.parents, torch.tensor([deep, shallow]))
    assert sorted(trie.depths[nodes[samples == 0]].tolist()) == [1, 2, 3, 4]
    assert nodes[samples == 1].tolist() == [shallow]


def test_unknown_loss_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="mean_mass"):
        PhraseLoss("mean_mas", TokenTrie(ENTRIES))
