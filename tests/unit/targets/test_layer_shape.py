"""The shape of a target's layers, as its configuration tells it."""

from __future__ import annotations

import pytest
from transformers import AutoConfig, GPT2Config, LlamaConfig

from paceline.targets.architecture import read_layer_shape


def test_sizes_are_those_of_the_configuration():
    shape = read_layer_shape(
        LlamaConfig(
            hidden_size=96, num_attention_heads=3, num_key_value_heads=1, head_dim=40, intermediate_size=112,
            rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 1234.0},
        )
    )  # fmt: skip
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.intermediate_size) == (3, 1, 40, 112)
    assert shape.norm_eps == 1e-5
    assert shape.rope_parameters == {"rope_type": "default", "rope_theta": 1234.0}


def test_full_attention_is_taken_where_kinds_of_layers_turn_differently():
    config = AutoConfig.for_model("gemma3_text")
    shape = read_layer_shape(config)
    assert shape.rope_parameters["rope_theta"] == config.rope_parameters["full_attention"]["rope_theta"]
    assert shape.head_dim == config.head_dim


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (
            {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
             "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
            {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5},
        ),
        (
            {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16,
             "long_factor": [2.0] * 16, "original_max_position_embeddings": 4096},
            {"rope_type": "default", "rope_theta": 1e4},
        ),
        (
            {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            {"rope_type": "default", "rope_theta": 1e4},
        ),
    ],
)  # fmt: skip
def test_scaling_is_kept_where_a_llama_layer_understands_it(rope, expected):
    found = read_layer_shape(LlamaConfig(rope_parameters=rope)).rope_parameters
    assert {name: found[name] for name in expected} == expected
    assert "partial_rotary_factor" not in found
    assert "long_factor" not in found


def test_other_names_of_sizes_are_understood():
    shape = read_layer_shape(GPT2Config(n_embd=64, n_head=4))
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.intermediate_size) == (4, 4, 16, 256)


def test_what_names_no_sizes_has_no_shape():
    assert read_layer_shape(object()) is None
