"""The target leaves a user's model as it is."""

from __future__ import annotations

import pytest

from paceline.errors import ConfigError
from paceline.targets.huggingface import HuggingFaceTarget
from paceline.testing import tiny_model


def test_leaves_gradients_and_settings_of_the_model_alone():
    model = tiny_model()
    attention = model.config._attn_implementation
    HuggingFaceTarget(model)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.config._attn_implementation == attention


def test_refuses_a_model_in_training_mode():
    with pytest.raises(ConfigError, match=r"model\.eval\(\)"):
        HuggingFaceTarget(tiny_model().train())


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_long_rope_ends_where_its_frequencies_would_change(key):
    """Keys of both frequencies in one cache would be wrong text: `generate` computes the cache anew there."""
    scaling = {
        "rope_type": "longrope",
        key: "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 64,
    }
    model = tiny_model("phi3", rope_parameters=scaling, original_max_position_embeddings=64)
    target = HuggingFaceTarget(model)
    assert model.config.max_position_embeddings == 256
    assert target.context_len == 64
