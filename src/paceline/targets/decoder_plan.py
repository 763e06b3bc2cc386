"""A decoder's weights under neutral names, whatever the modelling file calls them.

`read_plan` knows the families that the project is tested on; any other model keeps Hugging Face's own
forward. What is read here is confirmed by `paceline.targets.probe`: logits are compared with the model's own
before the plan is used.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, silu

from paceline.errors import UnsupportedFeatureError
from paceline.targets.architecture import Architecture

FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo2",
    "gpt2",
    "gpt_neox",
)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
    "gelu_erf": gelu,
    "relu": relu,
}


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """A linear layer that may be joined from several, made only when it is packed.

    Attributes:
        owners: the model's own parameters that hold the weights.
        biases: likewise, one per owner where there are any.
        arrange: from the owners' tensors, weights or biases, to one [out, in] or [out].
    """

    owners: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]
    arrange: Callable[[Tensor], Tensor] = lambda tensor: tensor

    def weight(self) -> Tensor:
        """[out, in]; a copy where it is joined from several."""
        return self.arrange(self._joined(self.owners))

    def bias(self) -> Tensor | None:
        """[out], zero where only some of the joined layers have one; None without."""
        if all(bias is None for bias in self.biases):
            return None
        return self.arrange(
            self._joined(
                [
                    owner.new_zeros(owner.shape[0]) if bias is None else bias
                    for owner, bias in zip(self.owners, self.biases, strict=True)
                ]
            )
        )

    @staticmethod
    def _joined(parts: Seq[Tensor]) -> Tensor:
        return parts[0].detach() if len(parts) == 1 else torch.cat([part.detach() for part in parts])


@dataclass(frozen=True, slots=True)
class NormPlan:
    """Effective weight (offsets included) and bias of a norm over the last axis, fp32."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One decoder layer; absent norms are None.

    Attributes:
        qkv: queries, keys and values of all heads, one below the other.
        attention_out: output projection of the attention.
        mlp_in: first layer of the MLP; gate and up one below the other where it is gated.
        mlp_out: last layer of the MLP.
        before_attention: norm of the attention's input; the others likewise.
        query_norm: RMS norm of queries, per head or over all heads.
        key_norm: likewise of keys.
        window: sliding window, None for full attention.
        layer_type: which rotary table the layer uses.
    """

    qkv: LinearPlan
    attention_out: LinearPlan
    mlp_in: LinearPlan
    mlp_out: LinearPlan
    before_attention: NormPlan | None
    after_attention: NormPlan | None
    before_mlp: NormPlan | None
    after_mlp: NormPlan | None
    query_norm: NormPlan | None
    key_norm: NormPlan | None
    window: int | None
    layer_type: str


@dataclass(frozen=True, slots=True)
class DecoderPlan:
    """A whole decoder.

    Attributes:
        layers: its layers.
        final_norm: norm in front of the output layer.
        num_heads: query heads.
        num_kv_heads: key-value heads.
        head_dim: size of a head.
        scale: factor of attention scores.
        soft_cap: bound of attention scores, None without.
        mlp_size: inner width of the MLP.
        activation: key of `ACTIVATIONS`.
        is_gated: the MLP has a gate.
        is_layer_norm: LayerNorm rather than RMS norm.
        norm_eps: of every norm.
        is_parallel: attention and MLP read the same residual.
        rotary: module that makes cosines and sines, None without.
        rotary_by_type: whether that module has one table per layer type.
        learned_positions: table of position embeddings, None without.
    """

    layers: tuple[LayerPlan, ...]
    final_norm: NormPlan
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    soft_cap: float | None
    mlp_size: int
    activation: str
    is_gated: bool
    is_layer_norm: bool
    norm_eps: float
    is_parallel: bool
    rotary: Any
    rotary_by_type: bool
    learned_positions: nn.Embedding | None

    @property
    def layer_types(self) -> tuple[str, ...]:
        """Distinct layer types, sorted: the order of the rotary tables."""
        return tuple(sorted({layer.layer_type for layer in self.layers}))


@torch.no_grad()
def read_plan(model: Any, architecture: Architecture) -> DecoderPlan:
    """Describe `model`; nothing is copied except what a projection has to be cut or joined from.

    Raises:
        UnsupportedFeatureError: not one of `FAMILIES`, or a variant that the kernels do not compute.
    """
    config = model.config
    family = str(getattr(config, "model_type", ""))
    if family not in FAMILIES:
        raise UnsupportedFeatureError(
            f"the fast path does not know {family or type(model).__name__!r} models; it runs "
            f"{', '.join(FAMILIES)}"
        )
    read_layer = {"gpt2": _read_gpt2, "gpt_neox": _read_gpt_neox}.get(family, _read_llama)
    layers = []
    for layer, kind in zip(architecture.layers, _layer_types(config, len(architecture.layers)), strict=True):
        window = architecture.sliding_window if kind == "sliding_attention" else None
        layers.append(read_layer(layer, config, kind, window))
    attentions = [_first(layer, "self_attn", "attn", "attention") for layer in architecture.layers]
    scales = {float(attention.scaling) for attention in attentions}
    if len(scales) != 1 or getattr(config, "reorder_and_upcast_attn", False):
        raise UnsupportedFeatureError("the fast path needs one scale of attention scores, and no upcasting")
    base: Any = architecture.base_model
    norm = _first(base, "norm", "ln_f", "final_layer_norm")
    return DecoderPlan(
        layers=tuple(layers),
        final_norm=_norm(norm),
        num_heads=architecture.num_heads,
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or architecture.num_heads),
        head_dim=layers[0].attention_out.weight().shape[1] // architecture.num_heads,
        scale=scales.pop(),
        soft_cap=getattr(config, "attn_logit_softcapping", None),
        activation=_activation(
            _first(_first(architecture.layers[0], "mlp"), "act_fn", "activation_fn", "act")
        ),
        mlp_size=layers[0].mlp_out.weight().shape[1],
        is_gated=read_layer is _read_llama,
        is_layer_norm=isinstance(norm, nn.LayerNorm),
        norm_eps=_eps(norm),
        is_parallel=family == "gpt_neox" and bool(config.use_parallel_residual),
        rotary=getattr(base, "rotary_emb", None),
        rotary_by_type=family == "gemma3_text",
        learned_positions=getattr(base, "wpe", None),
    )


def _read_llama(layer: Any, _: Any, kind: str, window: int | None) -> LayerPlan:
    """Llama and what descends from it: separate or joined projections, norms before or after, or both."""
    attention, mlp = layer.self_attn, layer.mlp
    # Phi-3 stores these joined already.
    if hasattr(attention, "qkv_proj"):
        qkv, mlp_in = _linear(attention.qkv_proj), _linear(mlp.gate_up_proj)
    else:
        qkv = _linear(attention.q_proj, attention.k_proj, attention.v_proj)
        mlp_in = _linear(mlp.gate_proj, mlp.up_proj)
    # Gemma 2 and 3 have four norms, OLMo 2 only those behind; elsewhere "post_attention" is before the MLP.
    has_input_norm = hasattr(layer, "input_layernorm")
    is_sandwich = hasattr(layer, "pre_feedforward_layernorm")
    norms_behind = is_sandwich or not has_input_norm
    before_mlp = "pre_feedforward_layernorm" if is_sandwich else "post_attention_layernorm"
    return LayerPlan(
        qkv=qkv,
        attention_out=_linear(attention.o_proj),
        mlp_in=mlp_in,
        mlp_out=_linear(mlp.down_proj),
        before_attention=_norm(layer.input_layernorm) if has_input_norm else None,
        after_attention=_norm(layer.post_attention_layernorm) if norms_behind else None,
        before_mlp=_norm(getattr(layer, before_mlp)) if has_input_norm else None,
        after_mlp=_norm(layer.post_feedforward_layernorm) if norms_behind else None,
        query_norm=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
        key_norm=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        window=window,
        layer_type=kind,
    )


def _read_gpt2(layer: Any, config: Any, kind: str, window: int | None) -> LayerPlan:
    """GPT-2: LayerNorm, and projections that store their weights as [in, out]."""
    if config.add_cross_attention:
        raise UnsupportedFeatureError("the fast path computes no cross-attention")

    def transposed(module: Any) -> LinearPlan:
        return LinearPlan((module.weight,), (module.bias,), lambda tensor: tensor.t())

    return LayerPlan(
        qkv=transposed(layer.attn.c_attn),
        attention_out=transposed(layer.attn.c_proj),
        mlp_in=transposed(layer.mlp.c_fc),
        mlp_out=transposed(layer.mlp.c_proj),
        before_attention=_norm(layer.ln_1),
        after_attention=None,
        before_mlp=_norm(layer.ln_2),
        after_mlp=None,
        query_norm=None,
        key_norm=None,
        window=window,
        layer_type=kind,
    )


def _read_gpt_neox(layer: Any, config: Any, kind: str, window: int | None) -> LayerPlan:
    """GPT-NeoX: query, key and value of one head lie together."""

    def by_kind(tensor: Tensor) -> Tensor:
        heads = tensor.view(config.num_attention_heads, 3, -1, *tensor.shape[1:])
        return heads.transpose(0, 1).flatten(0, 2)

    joined = layer.attention.query_key_value
    return LayerPlan(
        qkv=LinearPlan((joined.weight,), (joined.bias,), by_kind),
        attention_out=_linear(layer.attention.dense),
        mlp_in=_linear(layer.mlp.dense_h_to_4h),
        mlp_out=_linear(layer.mlp.dense_4h_to_h),
        before_attention=_norm(layer.input_layernorm),
        after_attention=None,
        before_mlp=_norm(layer.post_attention_layernorm),
        after_mlp=None,
        query_norm=None,
        key_norm=None,
        window=window,
        layer_type=kind,
    )


def _first(module: Any, *names: str) -> Any:
    """The first of these attributes that `module` has."""
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise UnsupportedFeatureError(
        f"the fast path finds none of {', '.join(names)} in {type(module).__name__}"
    )


def _layer_types(config: Any, num_layers: int) -> list[str]:
    declared = getattr(config, "layer_types", None)
    if declared:
        return list(declared)
    is_sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return ["sliding_attention" if is_sliding else "full_attention"] * num_layers


def _linear(*modules: Any) -> LinearPlan:
    """Linear layers of the same input, one below the other."""
    for module in modules:
        if type(module) is not nn.Linear:
            raise UnsupportedFeatureError(
                f"the fast path needs plain Linear layers, not {type(module).__name__}"
            )
    return LinearPlan(tuple(m.weight for m in modules), tuple(m.bias for m in modules))


def _eps(norm: Any) -> float:
    return float(_first(norm, "variance_epsilon", "eps"))


def _norm(module: Any) -> NormPlan:
    """Weight and bias of a norm; Gemma's weights are stored less one."""
    weight = module.weight.detach().float()
    if isinstance(module, nn.LayerNorm):
        return NormPlan(weight, None if module.bias is None else module.bias.detach().float())
    ones = torch.ones_like(module.weight)
    effective = module(ones[None])[0].float() * (1.0 + _eps(module)) ** 0.5
    candidates = (weight, weight + 1.0)
    errors = [float((effective - candidate).abs().max()) for candidate in candidates]
    best = min(range(2), key=errors.__getitem__)
    if errors[best] > 0.02 * float(effective.abs().max().clamp(min=1.0)):
        raise UnsupportedFeatureError(f"the fast path does not compute {type(module).__name__}")
    return NormPlan(candidates[best])


def _activation(module: Any) -> str:
    """Which of `ACTIVATIONS` this module computes, found by its values."""
    points = torch.linspace(-4, 4, 33)
    values = module(points)
    for name, function in ACTIVATIONS.items():
        if torch.allclose(values, function(points), atol=2e-5):
            return name
    raise UnsupportedFeatureError(f"the fast path does not compute {type(module).__name__}")
