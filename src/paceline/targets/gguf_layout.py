"""What a GGUF file of a known architecture becomes: a transformers configuration and named tensors.

Known are `llama` (without experts) and `gemma3`. llama.cpp stores the query and key rows of Llama in the
order of its own rotary layout, and Gemma's norm weights with one added; both are undone here. Everything that
is not understood (another architecture, a tensor with an unknown name) makes `plan_conversion` answer None,
and transformers converts the file; what would silently change the model's text (a rotary scaling that cannot
be carried over) is an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError, UnsupportedFeatureError
from paceline.targets.gguf_file import GgufFile, GgufTensor
from paceline.targets.gguf_tokenizer import eos_token_ids

_ROPE_FACTORS = "rope_freqs.weight"
_COMMON = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAMES: Mapping[str, Mapping[str, str]] = {
    "llama": {**_COMMON, "ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        **_COMMON,
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_CLASSES = {"llama": ("llama", "LlamaForCausalLM"), "gemma3": ("gemma3_text", "Gemma3ForCausalLM")}
_CONFIG_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_GEMMA3_KEYS = {"attention.sliding_window": "sliding_window"}
_TOKEN_IDS = {"bos_token_id": "bos_token_id", "padding_token_id": "pad_token_id"}
# Shared by all Llama 3.1 to 3.3 checkpoints; a file stores only the factors that follow from them.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor to write: its transformers name, where it is stored, what to do with the values.

    Attributes:
        row_order: stored row of each written row; None keeps the order.
        added: constant that the file added to every value.
    """

    name: str
    stored: GgufTensor
    row_order: NDArray[np.int64] | None = None
    added: float = 0.0


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """The configuration (content of config.json) and the tensors of a converted model."""

    config: Mapping[str, Any]
    tensors: tuple[PlannedTensor, ...]


def plan_conversion(file: GgufFile) -> ConversionPlan | None:
    """Plan the conversion of a GGUF file; None when its architecture or one of its tensors is not known here.

    Raises:
        UnsupportedFeatureError: the file asks for a rotary scaling that cannot be carried over.
        CheckpointError: the header lacks a needed key.
    """
    architecture = str(file.metadata.get("general.architecture"))
    _refuse_rope_scaling(file, architecture)
    if architecture not in _LAYER_NAMES:
        return None
    named = {name: _transformers_name(name, architecture) for name in file.tensors if name != _ROPE_FACTORS}
    per_layer = isinstance(file.metadata.get(f"{architecture}.attention.head_count_kv"), list)
    if per_layer or None in named.values():
        return None
    config = _config(file, architecture)
    tensors = []
    for name, target in named.items():
        stored = file.tensors[name]
        row_order = _half_split_rows(name, stored, config) if architecture == "llama" else None
        added = 1.0 if architecture == "gemma3" and name.endswith("norm.weight") else 0.0
        tensors.append(PlannedTensor(str(target), stored, row_order, added))
    if config["tie_word_embeddings"]:
        tensors = [tensor for tensor in tensors if tensor.name != "lm_head.weight"]
    return ConversionPlan(config, tuple(tensors))


def _transformers_name(name: str, architecture: str) -> str | None:
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    inner = match and _LAYER_NAMES[architecture].get(match[2])
    return f"model.layers.{match[1]}.{inner}.weight" if match and inner else None


def _config(file: GgufFile, architecture: str) -> dict[str, Any]:
    metadata = file.metadata
    model_type, class_name = _CLASSES[architecture]
    config: dict[str, Any] = {"architectures": [class_name], "model_type": model_type, "dtype": "float32"}
    try:
        for key, name in (_CONFIG_KEYS | (_GEMMA3_KEYS if architecture == "gemma3" else {})).items():
            config[name] = metadata[f"{architecture}.{key}"]
        embedding = file.tensors["token_embd.weight"]
    except KeyError as error:
        raise CheckpointError(f"{file.path} is not a whole {architecture} model: it has no {error}") from None
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = metadata.get(f"{architecture}.attention.head_count_kv", heads)
    config["head_dim"] = metadata.get(
        f"{architecture}.attention.key_length",
        metadata.get(f"{architecture}.rope.dimension_count", config["hidden_size"] // heads),
    )
    config["vocab_size"] = embedding.shape[0]
    config["tie_word_embeddings"] = _is_tied(file)
    config |= {name: metadata.get(f"tokenizer.ggml.{key}") for key, name in _TOKEN_IDS.items()}
    ends = eos_token_ids(metadata)
    config["eos_token_id"] = ends[0] if len(ends) == 1 else (ends or None)
    theta = float(metadata.get(f"{architecture}.rope.freq_base", 10000.0))
    if architecture == "gemma3":
        config["query_pre_attn_scalar"] = _gemma3_query_scale(config)
        config["rope_parameters"] = {
            "full_attention": {"rope_type": "default", "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }
    else:
        config["rope_parameters"] = _llama_rope(file, theta, config["head_dim"])
    return config


def _gemma3_query_scale(config: Mapping[str, Any]) -> int:
    """Gemma 3 27B alone scales queries by the width per head instead of the head's own dimension."""
    if config["num_hidden_layers"] == 62:
        return int(config["hidden_size"]) // int(config["num_attention_heads"])
    return int(config["head_dim"])


def _is_tied(file: GgufFile) -> bool:
    """Whether the output layer is the embedding: absent, or written a second time with the same bytes."""
    output, embedding = file.tensors.get("output.weight"), file.tensors["token_embd.weight"]
    if output is None:
        return True
    if (output.shape, output.quantization) != (embedding.shape, embedding.quantization):
        return False
    first, second = (
        np.frombuffer(file.mapped, np.uint8, tensor.num_bytes, tensor.start) for tensor in (output, embedding)
    )
    return bool(np.array_equal(first, second))


def _half_split_rows(name: str, stored: GgufTensor, config: Mapping[str, Any]) -> NDArray[np.int64] | None:
    """Undo llama.cpp's interleaved rotary order of query and key rows: (pair, 2) to (2, pair) per head."""
    if ".attn_q." not in name and ".attn_k." not in name:
        return None
    heads = int(config["num_attention_heads" if ".attn_q." in name else "num_key_value_heads"])
    rows = np.arange(stored.num_rows).reshape(heads, -1, 2)
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1)


def _refuse_rope_scaling(file: GgufFile, architecture: str) -> None:
    kind = file.metadata.get(f"{architecture}.rope.scaling.type", "none")
    if kind != "none" and not (architecture == "llama" and kind == "linear"):
        raise UnsupportedFeatureError(
            f"{file.path}: rotary scaling {kind!r} of a {architecture} GGUF file is not carried over; "
            "use the model's safetensors checkpoint"
        )


def _llama_rope(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    factors = file.tensors.get(_ROPE_FACTORS)
    if factors is not None:
        stored = np.concatenate([chunk.reshape(-1) for chunk in file.float_chunks(factors)])
        return {"rope_theta": theta, **_llama3_scaling(file, stored, theta, head_dim)}
    if file.metadata.get("llama.rope.scaling.type") == "linear":
        factor = float(file.metadata["llama.rope.scaling.factor"])
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    return {"rope_type": "default", "rope_theta": theta}


def _llama3_scaling(
    file: GgufFile, stored: NDArray[np.float32], theta: float, head_dim: int
) -> dict[str, Any]:
    """The parameters behind stored frequency factors, accepted only if they give back every factor."""
    factor = float(stored.max())
    low, high, original = _LLAMA3_ROPE.values()
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    share = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - share) / factor + share)
    if expected.shape != stored.shape or not np.allclose(expected, stored, rtol=1e-4):
        raise UnsupportedFeatureError(
            f"{file.path}: its rotary frequency factors are not those of Llama 3; "
            "use the model's safetensors checkpoint"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3_ROPE}
