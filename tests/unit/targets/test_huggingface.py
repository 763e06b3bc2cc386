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
