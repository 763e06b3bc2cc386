"""Any Hugging Face causal LM as a target, unmodified.

A forward packs the segments of all running sequences into one batch: rows are sequences (padded to the
widest), a 4-D mask lets every draft node see the cached tokens and its own ancestors, positions follow depth,
and keys and values land in `paceline.kv_cache`. Nothing of a modelling file is copied: what differs between
architectures (head bias, logit scale, soft-cap, embedding scale, mask per layer type) is read from the
configuration and confirmed against the model's own forward when the target is built.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor, nn

from paceline.config import EXECUTIONS, check_known
from paceline.errors import ConfigError, IncompatibleModelError, ShapeError, UnsupportedFeatureError
from paceline.kv_cache import Growth, KVCache
from paceline.sequence import Segment, Sequence, VerifyResult
from paceline.targets.architecture import Architecture, read_architecture, read_layer_shape
from paceline.targets.base import DecoderLayerShape, OutputRows, TargetOutput
from paceline.targets.buckets import MAX_WIDTH
from paceline.targets.cuda_graphs import CudaGraphs
from paceline.targets.eager_forward import EagerDecoder
from paceline.targets.fast import FastDecoder
from paceline.targets.model_call import ModelCall
from paceline.targets.probe import (
    check_rounds,
    check_target,
    record_layer_shapes,
    reference_logits,
    refused_by_model,
)
from paceline.targets.static_forward import CaptureError, GraphCapture, StaticDecoder
from paceline.transfers import upload

STATIC_GROWTH = Growth(block_len=1024, tail_len=MAX_WIDTH, doubles_slots=True, is_lazy=False)
"""Of the cache under captured forwards: large steps, since each one means capturing anew."""


class WeightsDroppedError(UnsupportedFeatureError):
    """The fast path turned out not to agree with the model after the model's own weights were dropped."""


class HuggingFaceTarget:
    """TargetModel over a `PreTrainedModel`.

    The model is shared. Eager execution neither changes nor copies it, and captured forwards read its weights
    where they are; the fast path of the CPU packs a copy of its weights, and drops them from the model where
    `releases_model` allows it.

    Args:
        model: a causal LM on one device, attention implementation `sdpa` or `eager`.
        execution: `eager` runs the model's own forward; `fast` compiled kernels on the same weights on the
            CPU (`paceline.targets.fast`) and captured forwards on CUDA (`paceline.targets.static_forward`);
            `auto` is `fast` where that is possible and agrees with the model.
        graphs: captures forwards; given, `fast` means captured forwards on any device (for tests).
        progress: told in one line what takes time.
        fingerprint: identifies weights and tokenizer (`targets.loading.target_fingerprint`); heads are
            matched by it.
        check: compare against the model's own forward first (a few short forwards).

    Raises:
        IncompatibleModelError: the model cannot verify a draft tree.
        UnsupportedFeatureError: its attention implementation or placement is not supported.
        ConfigError: the model is in training mode.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        fingerprint: str = "",
        check: bool = True,
        execution: str = "eager",
        releases_model: bool = False,
        progress: Callable[[str], None] | None = None,
        graphs: GraphCapture | None = None,
    ) -> None:
        check_known("execution", execution, EXECUTIONS)
        self.fingerprint = fingerprint
        self.model = model
        self.architecture: Architecture = read_architecture(model)
        if model.training:
            raise ConfigError(f"{type(model).__name__} is in training mode: call model.eval() first")
        self.model_call = ModelCall(model, self.architecture)
        weight: Tensor = self.architecture.lm_head.weight
        self._dtype, self._device = weight.dtype, weight.device
        self._fast: FastDecoder | None = None
        self._static: StaticDecoder | None = None
        self._is_fast_required = execution == "fast"
        self.eager_reason = "chosen"
        if execution == "eager":
            graphs = None
        elif graphs is None and self._device.type == "cuda":
            graphs = CudaGraphs(self._device)
        self._slots: dict[Sequence, int] = {}
        self._cached: dict[Sequence, int] = {}
        with refused_by_model(model):
            shapes = record_layer_shapes(self)
        growth = None if graphs is None else STATIC_GROWTH
        self.kv_cache = KVCache(shapes, self._dtype, self._device, growth)
        num_groups = 1
        num_kv_heads = {shape.num_heads for shape in shapes.values()}
        if self.model_call.uses_packed_attention and len(num_kv_heads) == 1:
            num_groups = self.architecture.num_heads // num_kv_heads.pop()
        self._eager = EagerDecoder(
            self.model_call,
            self.architecture,
            self.kv_cache,
            num_tiles=num_groups,
            dtype=self._dtype,
            device=self._device,
        )
        self.num_weight_bytes = sum(_num_bytes(parameter) for parameter in model.parameters())
        table: Any = self.architecture.embedding.weight
        # Of an input embedding of its own a forward reads a few rows.
        self.num_read_bytes = self.num_weight_bytes - (0 if table is weight else _num_bytes(table))
        if graphs is not None:
            if self._takes_static_path(graphs):
                return
        elif execution != "eager" and self._takes_fast_path(releases_model, progress):
            return
        if check:
            with refused_by_model(model):
                check_target(self, reference_logits(self))

    def _takes_static_path(self, graphs: GraphCapture) -> bool:
        """Try captured forwards and hold them against the model's own.

        Returns:
            Whether they are used; where they are not possible or differ, `eager_reason` says why.

        Raises:
            UnsupportedFeatureError: they are required and cannot be used.
        """
        self._static = StaticDecoder(
            self.model_call,
            self.architecture,
            self.kv_cache,
            num_tiles=self._eager.num_tiles,
            dtype=self._dtype,
            device=self._device,
            graphs=graphs,
        )
        try:
            with refused_by_model(self.model):
                check_rounds(self, reference_logits(self))
        except IncompatibleModelError as error:
            self._leave_static_path(error)
        is_used = self.execution == "fast"
        if is_used:
            self.eager_reason = ""
        return is_used

    def _leave_static_path(self, error: Exception) -> None:
        """Go on eagerly, or raise where captured forwards are required."""
        self._static = None
        self.eager_reason = str(error)
        if self._is_fast_required:
            raise UnsupportedFeatureError(f"execution 'fast': {error}") from error

    def _takes_fast_path(self, releases_model: bool, progress: Callable[[str], None] | None) -> bool:
        """Build the compiled path and hold it against the model's own forward.

        Returns:
            Whether it is used; where it is not possible or differs, `eager_reason` says why.

        Raises:
            UnsupportedFeatureError: it is required, or the weights are gone already, and it cannot be used.
        """
        with refused_by_model(self.model):
            reference = reference_logits(self)
        try:
            self._fast = FastDecoder(
                self.model, self.architecture, releases=releases_model, progress=progress
            )
            check_target(self, reference)
        except (UnsupportedFeatureError, IncompatibleModelError) as error:
            is_gone = releases_model and self._fast is not None
            self._fast = None
            self.eager_reason = str(error)
            if is_gone:
                raise WeightsDroppedError(f"execution 'fast': {error}") from error
            if self._is_fast_required:
                raise UnsupportedFeatureError(f"execution 'fast': {error}") from error
            return False
        self.eager_reason = ""
        if releases_model:
            self.model.forward = _no_weights
        return True

    @property
    def execution(self) -> str:
        """`fast` or `eager`: how forwards are computed."""
        return "eager" if self._fast is None and self._static is None else "fast"

    @property
    def pads_rows(self) -> bool:
        """Whether a forward computes as many rows for every sequence as for the widest one."""
        return self._fast is None

    @property
    def num_cache_bytes_per_token(self) -> int:
        """Bytes of keys and values, all layers, that one cached token takes."""
        return self.kv_cache.num_bytes_per_token

    @property
    def architecture_name(self) -> str:
        """Class of the model: `LlamaForCausalLM`."""
        return type(self.model).__name__

    @property
    def vocab_size(self) -> int:
        """Rows of the output layer."""
        return int(self.architecture.lm_head.weight.shape[0])

    @property
    def hidden_size(self) -> int:
        """Width D of the hidden state."""
        return int(self.architecture.lm_head.weight.shape[1])

    @property
    def num_layers(self) -> int:
        """Number of decoder layers L."""
        return len(self.architecture.layers)

    @property
    def context_len(self) -> int:
        """Most tokens that one sequence may have."""
        return self.architecture.context_len

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights and of the hidden state."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._device

    @property
    def embedding_table(self) -> Tensor | None:
        """[V, D]: weights of the input embeddings, whatever factor the model applies to them."""
        table: Any = self.architecture.embedding.weight
        return table.detach() if table.dim() == 2 and table.shape[1] == self.hidden_size else None

    @property
    def output_rows(self) -> OutputRows | None:
        """The output layer row by row; the packed path keeps its weights beside the packed ones."""
        weight: Any = getattr(self.architecture.lm_head, "weight", None)
        if weight is None or weight.dim() != 2 or weight.shape[1] != self.hidden_size:
            return None
        bias = getattr(self.architecture.lm_head, "bias", None)
        return OutputRows(
            weight.detach(),
            None if bias is None else bias.detach(),
            self.architecture.logit_scale,
            self.architecture.logit_soft_cap,
        )

    @property
    def layer_shape(self) -> DecoderLayerShape | None:
        """Sizes of the target's own layers, by its configuration."""
        return read_layer_shape(self.model.config)

    @torch.no_grad()
    def embedding(self, token_ids: Tensor) -> Tensor:
        """Input embeddings, scaled as the model scales them: int64 [...] -> [..., D]."""
        embedded: Tensor = self.architecture.embedding(upload(token_ids, self._device))
        scale = self.architecture.embedding_scale
        return embedded if scale == 1.0 else embedded * scale

    @torch.no_grad()
    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states with the model's bias, scale and soft-cap: [..., D] -> [..., V]."""
        logits: Tensor = (
            self.architecture.lm_head(hidden) if self._fast is None else self._fast.logits(hidden)
        )
        if self.architecture.logit_scale != 1.0:
            logits = logits * self.architecture.logit_scale
        soft_cap = self.architecture.logit_soft_cap
        if soft_cap is not None:
            logits = torch.tanh(logits / soft_cap) * soft_cap
        return logits

    def cached_len(self, sequence: Sequence) -> int:
        """Tokens of the sequence whose keys and values are cached."""
        return self._cached.get(sequence, 0)

    @torch.inference_mode()
    def forward(self, segments: Seq[Segment], features: Seq[int] = ()) -> TargetOutput:
        """Score the segments and write their keys and values behind the cached ones.

        One forward serves all of them when their slots are consecutive, which `release` keeps true for the
        whole set of running sequences; other selections take one forward per run of slots.

        Args:
            segments: at most one per sequence, none empty.
            features: layers whose inputs are wanted, each in [0, L).

        Raises:
            ShapeError: a layer is out of range or a segment is empty.
        """
        if any(layer not in range(self.num_layers) for layer in features):
            raise ShapeError(f"feature layers {list(features)}: each must be in [0, {self.num_layers})")
        if not segments or any(len(segment) == 0 for segment in segments):
            raise ShapeError("a forward needs at least one segment, and none without tokens")
        for segment in segments:
            if segment.sequence not in self._slots:
                self._slots[segment.sequence] = len(self._slots)
                self._cached[segment.sequence] = 0
        if self._fast is not None:
            return self._forward_fast(self._fast, segments, features)
        if self._static is not None and self._static.takes(segments):
            return self._forward_static(self._static, segments, features)
        return self._forward_eager(segments, features)

    def _forward_eager(self, segments: Seq[Segment], features: Seq[int]) -> TargetOutput:
        """The model's own forward."""
        starts = [self._cached[segment.sequence] for segment in segments]
        slots = [self._slots[segment.sequence] for segment in segments]
        states = self._eager.forward(segments, slots, starts, features)
        for segment in segments:
            self._cached[segment.sequence] += len(segment.prefix_ids)
        return TargetOutput(states.hidden, states.features, segments, self.lm_head)

    def _forward_fast(self, fast: FastDecoder, segments: Seq[Segment], features: Seq[int]) -> TargetOutput:
        """All segments in one call, whatever their slots and lengths."""
        starts = [self._cached[segment.sequence] for segment in segments]
        slots = [self._slots[segment.sequence] for segment in segments]
        longest = max(start + len(segment) for start, segment in zip(starts, segments, strict=True))
        self.kv_cache.reserve(max(slots) + 1, longest)
        hidden, captured = fast.forward(segments, slots, starts, self.embedding, self.kv_cache, features)
        for segment in segments:
            self._cached[segment.sequence] += len(segment.prefix_ids)
        return TargetOutput(hidden, captured, segments, self.lm_head)

    def _forward_static(
        self, static: StaticDecoder, segments: Seq[Segment], features: Seq[int]
    ) -> TargetOutput:
        """A decoding round by a captured forward; eagerly from now on where it cannot be captured."""
        starts = [self._cached[segment.sequence] for segment in segments]
        slots = [self._slots[segment.sequence] for segment in segments]
        try:
            hidden, captured = static.forward(segments, slots, starts, features)
        except CaptureError as error:
            self._leave_static_path(error)
            return self.forward(segments, features)
        return TargetOutput(hidden, captured, segments, self.lm_head)

    def commit(self, sequence: Sequence, result: VerifyResult) -> None:
        """Keep the root and the accepted path; the newest emitted token, the next root, is not cached yet."""
        start = self._cached[sequence]
        path = result.path[: len(result.emitted_ids) - 1]
        self.kv_cache.compact(self._slots[sequence], start, path)
        self._cached[sequence] = start + 1 + len(path)

    def adopt(self, sequence: Sequence, former: Sequence) -> int:
        """Take over the cache of a finished sequence as far as the tokens agree; `former` gives it up."""
        if former not in self._slots:
            return 0
        limit = min(self._cached[former], len(sequence) - 1)
        old_ids, new_ids = former.token_ids, sequence.token_ids
        reused = next((i for i in range(limit) if old_ids[i] != new_ids[i]), limit)
        self._slots[sequence] = self._slots.pop(former)
        del self._cached[former]
        self._cached[sequence] = reused
        return reused

    def release(self, sequence: Sequence) -> None:
        """Free the slot; the sequence in the last one moves into the gap, so that slots stay consecutive."""
        slot = self._slots.pop(sequence, None)
        if slot is None:
            return
        del self._cached[sequence]
        last = len(self._slots)
        if slot != last:
            moved = next(s for s, used in self._slots.items() if used == last)
            self.kv_cache.move(last, slot, self._cached[moved])
            self._slots[moved] = slot


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _no_weights(*_: Any, **__: Any) -> Any:
    """Stands in for the forward of a model whose weights were packed and dropped."""
    raise ConfigError(
        "this model's weights were packed for the fast path and dropped: load it with keep_model=True to use "
        "it beside paceline"
    )
