"""What a Hugging Face model's configuration says about its attention and its output layer.

Everything here is confirmed by `paceline.targets.probe` against the model's own forward before it is relied
on.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from torch import nn

from paceline.errors import IncompatibleModelError, UnsupportedFeatureError
from paceline.targets.base import DecoderLayerShape

# Attributes under which decoders keep their list of layers.
LAYER_LISTS = ("layers", "h", "blocks", "decoder.layers")
UNLIMITED_CONTEXT = 1 << 30


@dataclass(frozen=True, slots=True)
class Architecture:
    """Parts and constants of a causal LM.

    Attributes:
        base_model: the decoder, final norm included.
        layers: its layers.
        embedding: input embedding module.
        embedding_scale: factor that the decoder applies to the embedding module's output.
        lm_head: output layer (a Linear, bias included where there is one).
        logit_scale: factor applied to its output.
        logit_soft_cap: bound of the logits, None without.
        layer_types: distinct attention kinds: full_attention, sliding_attention.
        sliding_window: window of the sliding layers.
        num_heads: query heads.
        context_len: longest sequence.
        is_sdpa: whether the model runs torch's scaled_dot_product_attention (else its own eager attention).
    """

    base_model: nn.Module
    layers: Seq[nn.Module]
    embedding: nn.Module
    embedding_scale: float
    lm_head: Any
    logit_scale: float
    logit_soft_cap: float | None
    layer_types: tuple[str, ...]
    sliding_window: int | None
    num_heads: int
    context_len: int
    is_sdpa: bool


def read_architecture(model: Any) -> Architecture:
    """Find the parts of `model`; refuse what cannot verify a draft tree.

    Raises:
        IncompatibleModelError: not a decoder-only causal LM with a cache that can be gathered.
        UnsupportedFeatureError: an attention implementation or a placement that is not offered.
    """
    config = getattr(model, "config", None)
    name = type(model).__name__
    if config is None or not hasattr(model, "get_output_embeddings"):
        raise IncompatibleModelError(f"{name} is not a Hugging Face model: give a causal LM")
    lm_head, base = model.get_output_embeddings(), model.base_model
    if getattr(config, "is_encoder_decoder", False) or lm_head is None or base is model:
        raise IncompatibleModelError(f"{name} is not a decoder-only causal LM: give one with an output layer")
    layer_types = _layer_types(config, name, bool(getattr(model, "_is_stateful", False)))
    implementation = getattr(config, "_attn_implementation", "eager")
    if implementation not in ("sdpa", "eager"):
        raise UnsupportedFeatureError(
            f"attention implementation {implementation!r} takes no draft-tree mask: load the model with "
            "attn_implementation='sdpa' or 'eager'"
        )
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1:
        raise UnsupportedFeatureError(f"the model lies on devices {sorted(devices)}: put it on one")
    return Architecture(
        base_model=base,
        layers=_find_layers(base, name),
        embedding=model.get_input_embeddings(),
        embedding_scale=float(getattr(config, "embedding_multiplier", 1.0) or 1.0),
        lm_head=lm_head,
        logit_scale=_logit_scale(config),
        logit_soft_cap=getattr(config, "final_logit_softcapping", None),
        layer_types=layer_types,
        sliding_window=getattr(config, "sliding_window", None),
        num_heads=int(config.num_attention_heads),
        context_len=_context_len(config),
        is_sdpa=implementation == "sdpa",
    )


# Scalings that a Llama layer understands without what other architectures keep beside them.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def read_layer_shape(config: Any) -> DecoderLayerShape | None:
    """Sizes of a model's layers; None for a configuration that does not name them."""
    hidden_size, num_heads = (
        getattr(config, "hidden_size", None),
        getattr(config, "num_attention_heads", None),
    )
    if not hidden_size or not num_heads:
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    # Models whose kinds of layers turn differently list them one by one.
    rope = rope.get("full_attention", rope)
    if rope.get("rope_type", "default") not in _ROPE_TYPES:
        rope = {"rope_theta": rope.get("rope_theta", 10000.0)}
    eps = getattr(config, "rms_norm_eps", None) or getattr(config, "layer_norm_eps", None) or 1e-6
    return DecoderLayerShape(
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * hidden_size,
        num_heads=num_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or hidden_size // num_heads,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            # A layer of Llama turns all of a head.
            **{name: value for name, value in rope.items() if name != "partial_rotary_factor"},
        },
        max_position_embeddings=_context_len(config),
        norm_eps=float(eps),
    )


def _layer_types(config: Any, name: str, is_stateful: bool) -> tuple[str, ...]:
    """Distinct attention kinds of the model's layers, sorted."""
    # GPT-Neo's `attention_layers` are local or global; its local ones build their window themselves.
    names = ("layer_types", "layers_block_type", "attention_layers")
    declared = next((found for found in (getattr(config, key, None) for key in names) if found), None)
    if declared is None:
        declared = ["sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"]
    kinds = tuple(sorted(set(declared)))
    foreign = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if foreign or is_stateful:
        raise IncompatibleModelError(
            f"{name} has layers of type {', '.join(foreign) or 'recurrent state'}: their state cannot be "
            "rolled back to an accepted path, or they make their own mask; full and sliding-window "
            "attention work"
        )
    return kinds


def _logit_scale(config: Any) -> float:
    """Granite divides its logits by `logits_scaling`; Cohere multiplies them by `logit_scale`."""
    divisor = getattr(config, "logits_scaling", None)
    factor = getattr(config, "logit_scale", None)
    return float(factor or 1.0) / float(divisor or 1.0)


def _context_len(config: Any) -> int:
    """Longest sequence.

    Long-rope models (Phi-3 with 128k positions) change all rotary frequencies once a sequence passes the
    length they were first trained with, and Hugging Face then computes the whole cache anew. Cached keys of a
    sequence could not be kept here, so such a model ends at that length.
    """
    limit = int(getattr(config, "max_position_embeddings", 0) or UNLIMITED_CONTEXT)
    for scaling in (getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)):
        if isinstance(scaling, dict) and "longrope" in (scaling.get("rope_type"), scaling.get("type")):
            first = scaling.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            limit = min(limit, int(first or limit))
    return limit


def _find_layers(base: Any, name: str) -> Seq[nn.Module]:
    """The decoder's list of layers."""
    for path in LAYER_LISTS:
        found = base
        for attribute in path.split("."):
            found = getattr(found, attribute, None)
        if isinstance(found, nn.ModuleList) and len(found):
            return list(found)
    raise IncompatibleModelError(f"{name} keeps its layers under none of {', '.join(LAYER_LISTS)}")
