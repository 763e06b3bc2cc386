"""EAGLE heads against a reference written to be read, and against published shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from paceline.errors import ConfigError
from paceline.heads.eagle import EagleConfig, EagleHead

EAGLE3 = EagleConfig("eagle3", 32, 32, 48, 4, 2, 24, feature_layers=(0, 1, 2))
EAGLE = EagleConfig("eagle", 32, 32, 48, 4, 4, 8, has_fusion_bias=True)


def causal(queries, keys, values):
    return functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)


def head_of(config, seed=0) -> EagleHead:
    torch.manual_seed(seed)
    head = EagleHead(config).eval()
    for name, parameter in head.named_parameters():
        if "norm" in name:  # ones would hide a norm that is left out
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return head


def reference(head, embedding, features, positions):
    """The layer in plain formulas: fed back and final states [T, D] of one sequence."""
    w, config = dict(head.named_parameters()), head.config
    size, d, eps = config.hidden_size, config.head_dim, config.norm_eps

    def rms(x, name):
        return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * w[name]

    if config.kind == "eagle3":
        state = torch.cat(list(features.unbind(1)), -1) @ w["fc.weight"].T
        inputs = torch.cat(
            [rms(embedding, "layer.input_layernorm.weight"), rms(state, "layer.hidden_norm.weight")], -1
        )
        if config.normalises_residual:
            state = rms(state, "layer.hidden_norm.weight")
    else:
        state = torch.cat([embedding, features[:, 0]], -1) @ w["fc.weight"].T + w["fc.bias"]
        inputs = state
    q, k, v = (
        (inputs @ w[f"layer.self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, d)).transpose(0, 1)
        for n in "qkv"
    )
    if config.normalises_heads:
        q, k = rms(q, "layer.self_attn.q_norm.weight"), rms(k, "layer.self_attn.k_norm.weight")
    angles = positions[:, None] / 10000 ** (torch.arange(0, d, 2) / d)
    turn = torch.polar(torch.ones_like(angles), angles)

    def rotate(x):
        pairs = torch.complex(x[..., : d // 2].contiguous(), x[..., d // 2 :].contiguous()) * turn
        return torch.cat([pairs.real, pairs.imag], -1)

    k, v = (x.repeat_interleave(config.num_heads // config.num_kv_heads, 0) for x in (rotate(k), v))
    scores = rotate(q) @ k.transpose(1, 2) / d**0.5
    scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    attended = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
    state = state + attended @ w["layer.self_attn.o_proj.weight"].T
    inner = rms(state, "layer.post_attention_layernorm.weight")
    gate, up = (inner @ w[f"layer.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
    state = state + (functional.silu(gate) * up) @ w["layer.mlp.down_proj.weight"].T
    assert size == state.shape[1]
    return state, rms(state, "norm.weight") if config.kind == "eagle3" else state


@pytest.mark.parametrize(
    "config",
    [EAGLE3, EAGLE, replace(EAGLE3, normalises_residual=True, normalises_heads=True)],
    ids=["eagle3", "eagle", "eagle3 with more norms"],
)
def test_states_are_those_of_the_reference(config):
    """Row 61 of the public faults: a residual or a norm that is lost shows here."""
    head = head_of(config)
    embedding, features = torch.randn(7, 32), torch.randn(7, len(config.feature_layers) or 1, 32)
    positions = torch.arange(3, 10)
    with torch.no_grad():
        found = head(embedding[None], head.fuse(features)[None], positions[None], causal)
        fed_back, final = reference(head, embedding, features, positions.float())
    torch.testing.assert_close(found.fed_back[0], fed_back, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.final[0], final, rtol=1e-5, atol=1e-5)


def test_the_published_head_of_qwen3_4b_has_its_size():
    """218,245,120 parameters with its output layer of 32,000 rows, without embeddings."""
    config = EagleConfig(
        "eagle3", 2560, 2560, 9728, 32, 8, 128, feature_layers=(2, 18, 33),
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    with torch.device("meta"):
        head = EagleHead(config)
    assert head.num_parameters + 32_000 * 2560 == 218_245_120


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_head_sizes_are_taken_from_the_configuration(num_kv_heads):
    """Row 57: 24 is not 32 / 4, and heads of keys are as many as it says."""
    head = head_of(replace(EAGLE3, num_kv_heads=num_kv_heads))
    attention = head.layer.self_attn
    assert attention.q_proj.weight.shape == (96, 64)
    assert attention.k_proj.weight.shape == (num_kv_heads * 24, 64)
    with torch.no_grad():
        states = head(torch.randn(1, 3, 32), torch.randn(1, 3, 32), torch.arange(3)[None], causal)
    assert states.final.shape == (1, 3, 32)


def test_rotary_tables_are_those_of_the_target():
    """Row 58: theta and scaling reach the drafter."""
    rope = {
        "rope_type": "llama3", "rope_theta": 100000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 1024,
    }  # fmt: skip
    head = head_of(replace(EAGLE3, rope_parameters=rope, max_position_embeddings=8192))
    described = LlamaConfig(
        hidden_size=32, num_attention_heads=4, head_dim=24, max_position_embeddings=8192, rope_parameters=rope
    )
    positions = torch.tensor([[0, 1, 5000]])
    expected = LlamaRotaryEmbedding(described)(torch.zeros(1), positions)
    for found, table in zip(head.rotary(positions), expected, strict=True):
        torch.testing.assert_close(found[:, 0], table)


def test_half_precision_leaves_the_rotary_frequencies_exact():
    """Rounded to bf16 they would turn far positions by a radian, and only acceptance would tell."""
    exact, positions = head_of(EAGLE3), torch.tensor([[0, 500, 5000]])
    half = head_of(EAGLE3).to(torch.bfloat16)
    assert half.dtype is torch.bfloat16
    for found, expected in zip(half.rotary(positions), exact.rotary(positions), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kind": "eagle4"}, "did you mean"),
        ({"num_heads": 0}, "num_heads is 0"),
        ({"num_kv_heads": 3}, "4 heads and 3 of keys"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"feature_layers": ()}, "eagle3 reads different layers"),
        ({"feature_layers": (1, 1, 2)}, "eagle3 reads different layers"),
        ({"feature_layers": (-1, 1, 2)}, "eagle3 reads different layers"),
        ({"kind": "eagle"}, "eagle none"),
        ({"kind": "eagle", "feature_layers": (), "target_hidden_size": 16}, "features are 16 wide"),
    ],
)
def test_shapes_that_cannot_work_are_refused(changes, named):
    with pytest.raises(ConfigError, match=named):
        replace(EAGLE3, **changes)
