"""EAGLE draft heads: one decoder layer that goes on from the target's own features.

- `eagle`: EAGLE-1 (arXiv 2401.15077) and EAGLE-2 (arXiv 2406.16858), which share weights: the token's
  embedding and the previous feature (the target's last hidden state) are joined by a linear layer and go
  through one Llama layer without a norm in front.
- `eagle3`: EAGLE-3 (arXiv 2503.01840): the features of three layers are fused by a linear layer; embedding
  and feature have a norm each and enter the attention side by side, the residual is the feature, and a final
  norm stands before the output layer.

Both read, at position i, the feature of position i and the embedding of token i + 1, and say what token i + 2
may be. When they draft further than the target has been, they read the state that they made themselves: of
EAGLE-3 the one before its final norm.

Layers of features are named by the convention of this project, their *input*: EAGLE's own code and vLLM's
speculators do the same, SpecForge and AngelSlim name the layer before, whose output it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.config import check_known
from paceline.errors import ConfigError

KINDS = ("eagle", "eagle3")
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention over whatever the caller keeps: rotated queries [B, H, T, d], rotated keys and values
[B, K, T, d] of the same positions -> [B, H, T, d]."""


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """Shape of a head. Nothing is derived by division: public checkpoints disagree with the quotient.

    Attributes:
        kind: of `KINDS`.
        hidden_size: D, of the layer and of what the output layer reads.
        target_hidden_size: width of one feature of the target; embeddings are `hidden_size` wide.
        intermediate_size: of the MLP.
        num_heads: attention heads H.
        num_kv_heads: heads of keys and values K.
        head_dim: d.
        feature_layers: layers of the target whose inputs are fused; none for `eagle`, which reads the last
            hidden state.
        rope_parameters: as transformers' Llama configuration has them: `rope_type`, `rope_theta`, scaling.
        max_position_embeddings: positions that rotary scaling starts from.
        norm_eps: of all norms.
        has_attention_bias: bias of q, k and v.
        has_output_bias: bias of o.
        has_fusion_bias: bias of `fc`.
        normalises_residual: whether the residual of `eagle3` is the normed feature (speculators'
            `norm_before_residual`).
        normalises_heads: a norm of every head of q and k, as Qwen 3 has them.
    """

    kind: str
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    feature_layers: tuple[int, ...] = ()
    rope_parameters: Mapping[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )
    max_position_embeddings: int = 2048
    norm_eps: float = 1e-6
    has_attention_bias: bool = False
    has_output_bias: bool = False
    has_fusion_bias: bool = False
    normalises_residual: bool = False
    normalises_heads: bool = False

    def __post_init__(self) -> None:
        """Refuse shapes that cannot work, naming the field and the value."""
        check_known("head kind", self.kind, KINDS)
        for name in (
            "hidden_size", "target_hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim",
            "max_position_embeddings",
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"eagle head: {name} is {value!r}: it must be a whole number of at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"eagle head: {self.num_heads} heads and {self.num_kv_heads} of keys: the one must be a "
                "multiple of the other"
            )
        if self.head_dim % 2:
            raise ConfigError(f"eagle head: head_dim is {self.head_dim}: it must be even")
        layers = self.feature_layers
        if (
            (self.kind == "eagle3") != bool(layers)
            or len(set(layers)) != len(layers)
            or any(i < 0 for i in layers)
        ):
            raise ConfigError(
                f"eagle head: kind {self.kind!r} with feature layers {list(layers)}: eagle3 reads different "
                "layers of the target, eagle none"
            )
        if self.kind == "eagle" and self.target_hidden_size != self.hidden_size:
            raise ConfigError(
                f"eagle head: features are {self.target_hidden_size} wide, states {self.hidden_size}: they "
                "must agree for eagle"
            )

    @property
    def attention_size(self) -> int:
        """Columns that q, k and v read."""
        return 2 * self.hidden_size if self.kind == "eagle3" else self.hidden_size


@dataclass(frozen=True, slots=True)
class EagleStates:
    """What the layer says of B times T positions.

    Attributes:
        fed_back: [B, T, D], read in place of a feature when drafting goes on.
        final: [B, T, D], what the output layer reads.
    """

    fed_back: Tensor
    final: Tensor


class EagleHead(nn.Module):
    """One decoder layer and what joins features and embeddings."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.norm_eps
        fused = len(config.feature_layers) * config.target_hidden_size if config.feature_layers else 2 * size
        self.fc = nn.Linear(fused, size, bias=config.has_fusion_bias)
        self.layer = _EagleLayer(config)
        self.norm = nn.RMSNorm(size, eps) if config.kind == "eagle3" else nn.Identity()
        # No buffer: a head that is cast to half precision keeps exact frequencies. Positions are in the
        # thousands, and an error of a thousandth turns a pair of coordinates by a radian there.
        self.inverse_frequencies, self.rotary_scale = _rotary_frequencies(config)

    @property
    def num_parameters(self) -> int:
        """Parameters, without embeddings and output layer, which are the target's."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.fc.weight.dtype

    def fuse(self, features: Tensor) -> Tensor:
        """Features of the target as the layer reads them.

        Args:
            features: [..., F, target_hidden_size], in the order of `feature_layers`; for `eagle` F is 1: the
                last hidden state.

        Returns:
            [..., D].
        """
        features = features.to(self.dtype)
        if self.config.kind == "eagle":
            return features[..., 0, :]
        fused: Tensor = self.fc(features.flatten(-2))
        return fused

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines: int64 [B, T] -> fp32 [B, 1, T, d] twice."""
        if self.inverse_frequencies.device != positions.device:
            self.inverse_frequencies = self.inverse_frequencies.to(positions.device)
        angles = positions[:, None, :, None].float() * self.inverse_frequencies
        both = torch.cat([angles, angles], dim=-1)
        return both.cos() * self.rotary_scale, both.sin() * self.rotary_scale

    def forward(self, embedding: Tensor, state: Tensor, positions: Tensor, attend: Attend) -> EagleStates:
        """One step.

        Args:
            embedding: [B, T, D], of the tokens behind the positions, scaled as the target scales them.
            state: [B, T, D], fused features, or states fed back.
            positions: int64 [B, T].
            attend: see `Attend`.
        """
        embedding, state = embedding.to(self.dtype), state.to(self.dtype)
        if self.config.kind == "eagle":
            state = self.fc(torch.cat([embedding, state], dim=-1))
        out = self.layer(embedding, state, self.rotary(positions), attend)
        return EagleStates(out, self.norm(out))


class _Attention(nn.Module):
    """Projections around `attend`."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        bias, inner = config.has_attention_bias, config.attention_size
        keys = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(inner, config.num_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(inner, keys, bias=bias)
        self.v_proj = nn.Linear(inner, keys, bias=bias)
        attended = config.num_heads * config.head_dim
        self.o_proj = nn.Linear(attended, config.hidden_size, bias=config.has_output_bias)
        if config.normalises_heads:
            self.q_norm = nn.RMSNorm(config.head_dim, config.norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, config.norm_eps)

    def forward(self, inputs: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """[B, T, attention_size] -> [B, T, D]."""
        parts = [
            layer(inputs).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        ]
        if self.config.normalises_heads:
            parts[:2] = [self.q_norm(parts[0]), self.k_norm(parts[1])]
        queries, keys = (rotated(part, rotary) for part in parts[:2])
        out: Tensor = self.o_proj(attend(queries, keys, parts[2]).transpose(1, 2).flatten(-2))
        return out


class _Mlp(nn.Module):
    """Gated with SiLU."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        sizes = (config.hidden_size, config.intermediate_size)
        self.gate_proj = nn.Linear(*sizes, bias=False)
        self.up_proj = nn.Linear(*sizes, bias=False)
        self.down_proj = nn.Linear(*sizes[::-1], bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(inputs)) * self.up_proj(inputs))
        return out


class _EagleLayer(nn.Module):
    """The decoder layer of either kind."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        self.self_attn = _Attention(config)
        self.mlp = _Mlp(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        if config.kind == "eagle3":
            self.input_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
            self.hidden_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)

    def forward(
        self, embedding: Tensor, state: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """[B, T, D] twice -> [B, T, D]."""
        inputs = state
        if self.config.kind == "eagle3":
            normed = self.hidden_norm(state)
            inputs = torch.cat([self.input_layernorm(embedding), normed], dim=-1)
            if self.config.normalises_residual:
                state = normed
        state = state + self.self_attn(inputs, rotary, attend)
        out: Tensor = state + self.mlp(self.post_attention_layernorm(state))
        return out


def rotated(vectors: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions as Llama lays them out: halves of [B, H, T, d] are the two coordinates."""
    cosines, sines = rotary
    wide = vectors.float()
    left, right = wide.chunk(2, dim=-1)
    return (wide * cosines + torch.cat([-right, left], dim=-1) * sines).to(vectors.dtype)


def _rotary_frequencies(config: EagleConfig) -> tuple[Tensor, float]:
    """Inverse frequencies [d / 2] and the factor of cosines and sines, by transformers' own rules."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    described = LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(config.rope_parameters),
    )
    with torch.device("cpu"):
        embedding = LlamaRotaryEmbedding(described)
    # A copy: as it is it would become a buffer of whatever module it is given to.
    return embedding.inv_freq.detach().clone().float(), float(embedding.attention_scaling)
