"""The kernels' structures for ctypes; field by field those of the C++ files beside it."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p
from typing import ClassVar

FP32, BF16 = 0, 1
RMS_NORM, LAYER_NORM = 0, 1
SILU, GELU_TANH, GELU_ERF, RELU = 0, 1, 2, 3


class Linear(Structure):
    """A packed linear layer."""

    _fields_: ClassVar = [
        ("weights", c_void_p),
        ("bias", c_void_p),
        ("num_in", c_int32),
        ("num_out", c_int32),
    ]


class Norm(Structure):
    """Weight (null: no norm here) and bias, fp32."""

    _fields_: ClassVar = [("weight", c_void_p), ("bias", c_void_p)]


class AttentionShape(Structure):
    """Heads, scale and soft-cap."""

    _fields_: ClassVar = [
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("scale", c_float),
        ("soft_cap", c_float),
    ]


class Layer(Structure):
    """One decoder layer."""

    _fields_: ClassVar = [
        ("qkv", Linear),
        ("attention_out", Linear),
        ("mlp_in", Linear),
        ("mlp_out", Linear),
        ("before_attention", Norm),
        ("after_attention", Norm),
        ("before_mlp", Norm),
        ("after_mlp", Norm),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("window", c_int32),
        ("rope", c_int32),
    ]


class Model(Structure):
    """Layers and constants of a decoder."""

    _fields_: ClassVar = [
        ("layers", POINTER(Layer)),
        ("final_norm", Norm),
        ("attention", AttentionShape),
        ("num_layers", c_int32),
        ("hidden_size", c_int32),
        ("mlp_size", c_int32),
        ("dtype", c_int32),
        ("norm_kind", c_int32),
        ("activation", c_int32),
        ("is_gated", c_int32),
        ("is_parallel", c_int32),
        ("norms_whole_qk", c_int32),
        ("rotary_dim", c_int32),
        ("norm_eps", c_float),
        ("joins_embedding", c_int32),
        ("keeps_normed", c_int32),
        ("embedding_norm", Norm),
    ]


class Rows(Structure):
    """Where the rows of a forward stand and what they see; int32 arrays."""

    _fields_: ClassVar = [
        ("num_rows", c_int32),
        ("slot", c_void_p),
        ("write", c_void_p),
        ("position", c_void_p),
        ("num_shared", c_void_p),
        ("tail_start", c_void_p),
        ("tail", c_void_p),
    ]


class Forward(Structure):
    """Everything of one forward."""

    _fields_: ClassVar = [
        ("rows", Rows),
        ("num_features", c_int32),
        ("num_positions", c_int32),
        ("residual", c_void_p),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("slot_stride", c_int64),
        ("head_stride", c_int64),
        ("hidden", c_void_p),
        ("feature_layers", c_void_p),
        ("features", c_void_p),
        ("embedding", c_void_p),
    ]


class PhraseHead(Structure):
    """A phrase head's layers."""

    _fields_: ClassVar = [
        ("layers", POINTER(Linear)),
        ("norms", POINTER(Norm)),
        ("output", Linear),
        ("depth", c_int32),
        ("num_inputs", c_int32),
        ("input_size", c_int32),
        ("output_dtype", c_int32),
        ("norm_eps", c_float),
        ("input_eps", c_float),
        ("narrowing", Linear),
        ("table", Linear),
        ("rows", c_void_p),
        ("row_bias", c_void_p),
        ("num_candidates", c_int32),
    ]


class Trie(Structure):
    """A token trie over the phrases; int32 arrays."""

    _fields_: ClassVar = [
        ("tokens", c_void_p),
        ("parents", c_void_p),
        ("depths", c_void_p),
        ("starts", c_void_p),
        ("ends", c_void_p),
        ("num_nodes", c_int32),
        ("num_entries", c_int32),
        ("tie", c_double),
    ]


class Chain(Structure):
    """What a phrase head needs to go on behind a first phrase; `num_first` 0 says that it does not."""

    _fields_: ClassVar = [
        ("layers", POINTER(Linear)),
        ("norms", POINTER(Norm)),
        ("output", Linear),
        ("followers", Trie),
        ("entry_starts", c_void_p),
        ("entry_tokens", c_void_p),
        ("embeddings", c_void_p),
        ("embeddings_dtype", c_int32),
        ("num_first", c_int32),
        ("min_nodes", c_int32),
    ]


class Drafts(Structure):
    """Inputs and results of one call of the phrase drafter."""

    _fields_: ClassVar = [
        ("num_rows", c_int32),
        ("max_nodes", c_int32),
        ("has_chains", c_int32),
        ("inputs", c_void_p),
        ("roots", c_void_p),
        ("tokens", c_void_p),
        ("parents", c_void_p),
        ("values", c_void_p),
        ("counts", c_void_p),
    ]


class TreeCall(Structure):
    """One tree of budgeted verification: its nodes, its request's limits, and what became of it."""

    _fields_: ClassVar = [
        ("parents", c_void_p),
        ("tokens", c_void_p),
        ("eos", c_void_p),
        ("num_nodes", c_int64),
        ("num_eos", c_int64),
        ("horizon", c_double),
        ("scale", c_double),
        ("gate", c_double),
        ("remaining", c_double),
        ("cap", c_double),
        ("price", c_double),
        ("next_token", c_int64),
        ("path_len", c_int64),
        ("num_relaxed", c_int64),
        ("stop_regret", c_double),
        ("stop_value", c_double),
        ("reason", c_int32),
        ("has_stop", c_int32),
    ]


class BudgetedCall(Structure):
    """Logits, trees and results of budgeted verification."""

    _fields_: ClassVar = [
        ("num_trees", c_int32),
        ("dtype", c_int32),
        ("num_threads", c_int32),
        ("size", c_int64),
        ("logits", c_void_p),
        ("trees", POINTER(TreeCall)),
        ("choices", c_void_p),
        ("path", c_void_p),
        ("path_tokens", c_void_p),
        ("places", c_void_p),
        ("regrets", c_void_p),
    ]


class GatherDot(Structure):
    """Chosen rows of an output layer, states and scores."""

    _fields_: ClassVar = [
        ("dtype", c_int32),
        ("num_threads", c_int32),
        ("num_rows", c_int64),
        ("num_ids", c_int64),
        ("size", c_int64),
        ("num_weights", c_int64),
        ("weight_stride", c_int64),
        ("index_stride", c_int64),
        ("hidden", c_void_p),
        ("weights", c_void_p),
        ("index", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
    ]


class SoftLoss(Structure):
    """Rows of logits that learn from the rows of a teacher."""

    _fields_: ClassVar = [
        ("num_rows", c_int64),
        ("size", c_int64),
        ("num_threads", c_int32),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("products", c_void_p),
        ("teacher", c_void_p),
        ("teacher_rows", c_void_p),
        ("bias", c_void_p),
        ("losses", c_void_p),
    ]


class RankingCall(Structure):
    """Narrow states, the table that ranks all entries, and the entries that it puts first."""

    _fields_: ClassVar = [
        ("table", Linear),
        ("dtype", c_int32),
        ("num_threads", c_int32),
        ("num_rows", c_int32),
        ("num_groups", c_int32),
        ("is_shared", c_int32),
        ("wanted", c_int64),
        ("states", c_void_p),
        ("stride", c_int64),
        ("scores", c_void_p),
        ("ids", c_void_p),
        ("log_share", c_void_p),
    ]
