"""The training-time test sees what drafting sees."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from paceline.heads.eagle import EagleConfig, EagleHead
from paceline.training.unrolled import unroll

T, D, F = 9, 32, 3


@pytest.fixture
def head() -> EagleHead:
    torch.manual_seed(0)
    head = EagleHead(EagleConfig("eagle3", D, D, 48, 4, 2, 8, feature_layers=(0, 1, 2))).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(1.5)
    return head


def causal(queries, keys, values):
    return functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)


def drafted(head, embedding, features, start, num_steps):
    """Final states of the tokens drafted behind pair `start`, one dense forward a step."""
    state = head.fuse(features[: start + 1])
    finals = []
    for _ in range(num_steps):
        size = len(state)
        found = head(embedding[None, :size], state[None], torch.arange(size)[None], causal)
        finals.append(found.final[0, -1])
        state = torch.cat([state, found.fed_back[0, -1:]])
    return finals


def test_every_step_is_what_drafting_computes(head):
    embedding, features = torch.randn(T, D), torch.randn(T, F, D)
    with torch.no_grad():
        steps = list(unroll(head, embedding[None], features[None], 4))
        for start in range(T - 4):
            for step, expected in enumerate(drafted(head, embedding, features, start, 4)):
                found = steps[step].final[0, start + step]
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_padding_changes_nothing(head):
    embedding, features = torch.randn(2, T, D), torch.randn(2, T, F, D)
    with torch.no_grad():
        together = list(unroll(head, embedding, features, 3, torch.tensor([T, 6])))
        alone = list(unroll(head, embedding[1:, :6], features[1:, :6], 3))
    # A step means something from the position of its own number on.
    for step, (padded, own) in enumerate(zip(together, alone, strict=True)):
        torch.testing.assert_close(padded.final[1, step:6], own.final[0, step:], rtol=1e-4, atol=1e-5)
        assert bool(padded.final.isfinite().all())


def test_gradients_flow_through_the_steps(head):
    """The last step's loss must reach the weights through the states of all steps before it."""
    embedding, features = torch.randn(1, T, D), torch.randn(1, T, F, D, requires_grad=True)
    *_, last = unroll(head, embedding, features, 3)
    last.final[0, 5].sum().backward()
    reached = features.grad.abs().sum(dim=(0, 2, 3)) > 0
    # Step 2 at position 5 is drafted behind pair 3: it has seen features 0 to 3 and no later ones.
    assert reached.tolist() == [True] * 4 + [False] * 5
    assert all(parameter.grad is not None for parameter in head.parameters())


def test_mixed_precision_stays_inside_the_steps_and_learns_in_full_precision(head):
    embedding, features = torch.randn(2, T, D), torch.randn(2, T, F, D)
    exact = list(unroll(head, embedding, features, 3))
    mixed = []
    for states in unroll(head, embedding, features, 3, dtype=torch.bfloat16):
        assert (embedding[0] @ embedding[0].T).dtype is torch.float32, "the caller computes as before"
        mixed.append(states)
    for step, (rough, fine) in enumerate(zip(mixed, exact, strict=True)):
        assert rough.final.dtype is rough.fed_back.dtype is torch.float32
        assert not torch.equal(rough.final, fine.final), "products were rounded"
        torch.testing.assert_close(rough.final[:, step:], fine.final[:, step:], rtol=0.1, atol=0.1)
    slopes, wanted = [], torch.randn(D)
    for steps in (mixed, exact):
        head.zero_grad()
        sum((states.final[:, i:] @ wanted).mean() for i, states in enumerate(steps)).backward()
        slopes.append(head.layer.mlp.up_proj.weight.grad.clone())
    assert slopes[0].dtype is torch.float32
    assert functional.cosine_similarity(*(s.flatten() for s in slopes), dim=0) > 0.99
