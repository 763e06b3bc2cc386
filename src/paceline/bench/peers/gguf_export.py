"""The target in memory as a GGUF file, so that llama.cpp decodes the very same weights.

The inverse of `targets/gguf_layout.py`, for Llama: query and key rows go into llama.cpp's rotary order, a
tied output layer is left out, matrices are stored in the precision asked for and norms in float32. Whatever
cannot be said the way llama.cpp reads it is refused.

Read `export_gguf` first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.bench.peers.gguf_vocabulary import SPLIT, GgufVocabulary, read_vocabulary
from paceline.config import check_known, dtype_name
from paceline.errors import UnsupportedFeatureError

FORMAT_VERSION = 1
PRECISIONS = ("bf16", "q8_0")
_Q8_0_BLOCK = 32
_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
}


@dataclass(frozen=True, slots=True)
class ExportedTensor:
    """One tensor of the file.

    Attributes:
        name: as llama.cpp knows it.
        values: [rows, columns], or [D] of a norm; rows in the model's own order.
        num_heads: heads whose rows change to llama.cpp's rotary order; None keeps the order.
    """

    name: str
    values: Tensor
    num_heads: int | None = None

    def rows(self) -> Tensor:
        """The values in the file's order of rows: per head (2, pair) becomes (pair, 2)."""
        if self.num_heads is None:
            return self.values
        num_rows, width = self.values.shape
        split = self.values.reshape(self.num_heads, 2, num_rows // self.num_heads // 2, width)
        return split.transpose(1, 2).reshape(num_rows, width)


def export_gguf(
    model: Any,
    tokenizer: Any,
    folder: Path,
    *,
    fingerprint: str,
    precision: str,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Write a model as a GGUF file, unless it is there already.

    Args:
        model: a Llama of transformers.
        tokenizer: its tokenizer.
        folder: where files are kept; created when needed.
        fingerprint: of the target; with its dtype it names the file.
        precision: of matrices, one of `PRECISIONS`.
        progress: told in one line what takes time.

    Raises:
        UnsupportedFeatureError: another architecture, or a setting that is not carried over.
    """
    check_known("precision", precision, PRECISIONS)
    check_exportable(model, precision)
    # The fingerprint is the same in every dtype; weights rounded twice are not the same weights.
    source = dtype_name(model.dtype)
    path = folder / f"{model.config.model_type}-{fingerprint}-{source}-{precision}-v{FORMAT_VERSION}.gguf"
    if path.is_file():
        return path
    vocabulary = read_vocabulary(tokenizer, model.get_input_embeddings().weight.shape[0])
    if progress is not None:
        progress(f"writing {path.name} once")
    folder.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        _write(temporary, model, vocabulary, precision)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def check_exportable(model: Any, precision: str) -> None:
    """Refuse a model that would not be the same model in the file."""
    config = model.config
    if config.model_type != "llama":
        raise UnsupportedFeatureError(
            f"a model of type {config.model_type!r} cannot be handed to llama.cpp: only 'llama' is written "
            "as GGUF"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    unlike = {
        "attention_bias": (bool(getattr(config, "attention_bias", False)), False),
        "mlp_bias": (bool(getattr(config, "mlp_bias", False)), False),
        "hidden_act": (config.hidden_act, "silu"),
        "rope_type": (rope.get("rope_type", "default"), "default"),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", 1.0), 1.0),
    }
    for name, (found, wanted) in unlike.items():
        if found != wanted:
            raise UnsupportedFeatureError(
                f"a Llama with {name} {found!r} cannot be handed to llama.cpp: only {wanted!r} is written as "
                "GGUF"
            )
    widths = {values.shape[-1] for _, values in model.named_parameters() if values.dim() == 2}
    uneven = sorted(width for width in widths if width % _Q8_0_BLOCK)
    if precision == "q8_0" and uneven:
        raise UnsupportedFeatureError(
            f"q8_0 stores blocks of {_Q8_0_BLOCK} values, and this model has rows of {uneven[0]}: use bf16"
        )


def exported_tensors(model: Any) -> Iterator[ExportedTensor]:
    """Every tensor of the file, in its order."""
    config = model.config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    yield ExportedTensor("token_embd.weight", embedding.detach())
    for number, layer in enumerate(model.model.layers):
        for name, stored in _LAYER_NAMES.items():
            weight = layer.get_submodule(name).weight.detach()
            yield ExportedTensor(f"blk.{number}.{stored}.weight", weight, heads.get(stored))
    yield ExportedTensor("output_norm.weight", model.model.norm.weight.detach())
    if output.data_ptr() != embedding.data_ptr():
        yield ExportedTensor("output.weight", output.detach())


def _write(path: Path, model: Any, vocabulary: GgufVocabulary, precision: str) -> None:
    """Header first, then one tensor at a time: a large model is never held twice."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quant_shape_to_byte_shape

    writer = GGUFWriter(path, "llama")
    try:
        _describe_model(writer, model.config, precision)
        _describe_vocabulary(writer, vocabulary)
        kinds = {name: GGMLQuantizationType[name.upper()] for name in (*PRECISIONS, "f32")}
        for tensor in exported_tensors(model):
            kind = kinds[precision if tensor.values.dim() == 2 else "f32"]
            shape = tuple(tensor.values.shape)
            stored = quant_shape_to_byte_shape(shape, kind)
            writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), int(np.prod(stored)), kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in exported_tensors(model):
            writer.write_tensor_data(_encoded(tensor, precision))
    finally:
        writer.close()


def _encoded(tensor: ExportedTensor, precision: str) -> NDArray[Any]:
    """The bytes of a tensor."""
    values = tensor.rows().cpu()
    if values.dim() == 1:
        return values.float().numpy()
    if precision == "bf16":
        return values.to(torch.bfloat16).contiguous().view(torch.int16).numpy()
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    encoded: NDArray[Any] = quantize(values.float().contiguous().numpy(), GGMLQuantizationType.Q8_0)
    return encoded


def _describe_model(writer: Any, config: Any, precision: str) -> None:
    """The keys under `general` and `llama`."""
    from gguf import LlamaFileType

    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    writer.add_file_type(LlamaFileType.MOSTLY_BF16 if precision == "bf16" else LlamaFileType.MOSTLY_Q8_0)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    writer.add_vocab_size(config.vocab_size)


def _describe_vocabulary(writer: Any, vocabulary: GgufVocabulary) -> None:
    """The keys under `tokenizer`."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(SPLIT)
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types(list(vocabulary.token_types))
    writer.add_token_merges(list(vocabulary.merges))
    writer.add_add_bos_token(False)
    for key, token_id in vocabulary.special_ids.items():
        writer.add_uint32(f"tokenizer.ggml.{key}", token_id)
