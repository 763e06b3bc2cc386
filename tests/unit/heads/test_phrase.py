"""The phrase head's shape, inputs and numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.errors import ConfigError, ShapeError
from paceline.heads.phrase import PhraseHead, PhraseHeadConfig


def head_of(seed: int = 0, **settings: Any) -> PhraseHead:
    torch.manual_seed(seed)
    return PhraseHead(
        PhraseHeadConfig(**{"hidden_size": 8, "num_entries": 5, "width": 16, **settings})
    ).eval()


@pytest.mark.parametrize(("num_entries", "published"), [(8_000, "3.434M"), (80_000, "21.94M")])
def test_the_default_shape_has_the_published_number_of_parameters(num_entries: int, published: str) -> None:
    with torch.device("meta"):
        head = PhraseHead(PhraseHeadConfig(hidden_size=2560, num_entries=num_entries))
    millions = head.num_parameters / 1e6
    assert f"{millions:.{len(published.split('.')[1]) - 1}f}M" == published
    assert sum(p.numel() for p in head.output.parameters()) == 257 * num_entries
    assert head.num_parameters - 257 * num_entries == 1_377_792


def test_depth_and_trunk_width_shape_the_trunk() -> None:
    head = head_of(depth=4, trunk_width=24)
    shapes = [tuple(layer.weight.shape) for layer in head.layers]
    assert shapes == [(24, 16), (24, 24), (24, 24), (16, 24)]
    assert head.output.weight.shape == (5, 16)
    assert head(torch.randn(3, 16)).shape == (3, 5)


def test_inputs_are_joined_in_the_order_of_the_configuration() -> None:
    hidden, newest, feature = torch.ones(2, 8), torch.full((2, 8), 2.0), torch.full((2, 8), 3.0)
    head = head_of(inputs=("newest_token_embedding", "hidden"), feature_layers=(7, 4))
    joined = head.join_inputs(hidden, newest, {4: feature, 7: feature + 1})
    assert joined.reshape(2, 4, 8)[:, :, 0].tolist() == [[2, 1, 4, 3]] * 2


def test_inputs_that_are_not_asked_for_are_left_out() -> None:
    head = head_of(inputs=("hidden",))
    joined = head.join_inputs(torch.ones(2, 8), torch.zeros(2, 8))
    assert torch.equal(joined, torch.ones(2, 8))
    assert head(joined).shape == (2, 5)


def test_a_feature_that_was_not_captured_is_refused() -> None:
    head = head_of(feature_layers=(3,))
    with pytest.raises(ShapeError, match="layer 3"):
        head.join_inputs(torch.ones(1, 8), torch.ones(1, 8), {2: torch.ones(1, 8)})


def test_scores_do_not_depend_on_the_scale_of_each_input() -> None:
    head, inputs = head_of(), torch.randn(4, 16)
    scaled = inputs.clone()
    scaled[:, :8] *= 300
    scaled[:, 8:] *= 0.02
    torch.testing.assert_close(head(scaled), head(inputs), rtol=1e-4, atol=1e-3)


def test_scores_depend_on_every_input() -> None:
    head, inputs = head_of(feature_layers=(1,)), torch.randn(1, 24, requires_grad=True)
    head(inputs).square().sum().backward()
    assert inputs.grad is not None
    assert (inputs.grad.reshape(3, 8).abs().sum(dim=1) > 1e-4).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_inputs_of_any_dtype_are_cast_at_the_border(dtype: torch.dtype) -> None:
    head, inputs = head_of(), torch.randn(3, 16).to(dtype)
    scores = head(inputs)
    assert scores.dtype == torch.float32
    assert torch.equal(scores, head(inputs.float()))


def test_the_output_layer_may_have_a_dtype_of_its_own() -> None:
    head, inputs = head_of(), torch.randn(3, 16)
    exact = head(inputs)
    head.output.to(torch.bfloat16)
    scores = head(inputs)
    assert scores.dtype == torch.bfloat16
    torch.testing.assert_close(scores.float(), exact, rtol=0.05, atol=0.05)


def test_joined_inputs_take_the_dtype_of_the_hidden_state() -> None:
    joined = head_of().join_inputs(torch.ones(1, 8, dtype=torch.bfloat16), torch.ones(1, 8))
    assert joined.dtype == torch.bfloat16


def test_dropout_acts_in_training_only() -> None:
    head, inputs = head_of(dropout=0.5), torch.randn(3, 16)
    assert torch.equal(head(inputs), head(inputs))
    head.train()
    assert not torch.equal(head(inputs), head(inputs))


def test_a_head_can_learn_to_tell_its_inputs_apart() -> None:
    head, inputs, labels = head_of().train(), torch.randn(5, 16), torch.arange(5)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(head(inputs), labels).backward()
        optimizer.step()
    assert torch.equal(head(inputs).argmax(dim=1), labels)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"num_entries": 0}, "num_entries is 0"),
        ({"width": 0}, "width is 0"),
        ({"depth": 0}, "depth is 0"),
        ({"trunk_width": 0}, "trunk_width is 0"),
        ({"width": "256"}, "width is '256', it must be a whole number"),
        ({"depth": 1.5}, "depth is 1.5"),
        ({"feature_layers": (-1,)}, "feature_layers is"),
        ({"dropout": "no"}, "dropout is 'no'"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"inputs": ("hiden",)}, "'hiden' is not known, did you mean 'hidden'"),
        ({"inputs": ()}, "at least one input"),
        ({"inputs": ("hidden", "hidden")}, "each input and feature layer once"),
        ({"feature_layers": (1, 1)}, "each input and feature layer once"),
    ],
)
def test_shapes_that_cannot_be_built_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PhraseHeadConfig(**{"hidden_size": 8, "num_entries": 5, **settings})
