"""Any Hugging Face causal LM as a target, unmodified.

A forward packs the segments of all running sequences into one batch: rows are sequences (padded to the
widest), a 4-D mask lets every draft node see the cached tokens and its own ancestors, positions follow depth,
and keys and values land in `paceline.kv_cache`. Nothing of a modelling file is copied: what differs between
architectures (head bias, logit scale, soft-cap, embedding scale, mask per layer type) is read from the
configuration and confirmed against the model's own forward when the target is built.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from paceline.config import EXECUTIONS, check_known
from paceline.errors import ConfigError, IncompatibleModelError, ShapeError, UnsupportedFeatureError
from paceline.kv_cache import KVCache
from paceline.sequence import Segment, Sequence, VerifyResult
from paceline.targets import attention
from paceline.targets.architecture import Architecture, read_architecture
from paceline.targets.base import TargetOutput
from paceline.targets.fast import FastDecoder
from paceline.targets.probe import check_target, record_layer_shapes, reference_logits, refused_by_model


class WeightsDroppedError(UnsupportedFeatureError):
    """The fast path turned out not to agree with the model after the model's own weights were dropped."""


class HuggingFaceTarget:
    """TargetModel over a `PreTrainedModel`.

    The model is shared. Eager execution neither changes nor copies it; the fast path packs a copy of its
    weights, and drops them from the model where `releases_model` allows it.

    Args:
        model: a causal LM on one device, attention implementation `sdpa` or `eager`.
        execution: `eager` runs the model's own forward; `fast` compiled kernels on the same weights (see
            `paceline.targets.fast`); `auto` is `fast` where that is possible and agrees with the model.
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
    ) -> None:
        check_known("execution", execution, EXECUTIONS)
        self.fingerprint = fingerprint
        self.model = model
        self.architecture: Architecture = read_architecture(model)
        if model.training:
            raise ConfigError(f"{type(model).__name__} is in training mode: call model.eval() first")
        self._base: nn.Module = self.architecture.base_model
        self._cache_argument = (
            "cache" if "cache" in inspect.signature(self._base.forward).parameters else "past_key_values"
        )
        weight: Tensor = self.architecture.lm_head.weight
        self._dtype, self._device = weight.dtype, weight.device
        self._fast: FastDecoder | None = None
        self.eager_reason = "chosen"
        self._slots: dict[Sequence, int] = {}
        self._cached: dict[Sequence, int] = {}
        with refused_by_model(model):
            shapes = record_layer_shapes(self)
        self.kv_cache = KVCache(shapes, self._dtype, self._device)
        # Falcon and others call sdpa in code of their own, which knows its own name only.
        has_interface = bool(getattr(model, "_supports_attention_backend", False))
        self._uses_packed_attention = self.architecture.is_sdpa and has_interface
        self._num_groups = 1
        num_kv_heads = {shape.num_heads for shape in shapes.values()}
        if self._uses_packed_attention and len(num_kv_heads) == 1:
            self._num_groups = self.architecture.num_heads // num_kv_heads.pop()
        self.num_weight_bytes = sum(_num_bytes(parameter) for parameter in model.parameters())
        table: Any = self.architecture.embedding.weight
        # Of an input embedding of its own a forward reads a few rows.
        self.num_read_bytes = self.num_weight_bytes - (0 if table is weight else _num_bytes(table))
        if execution != "eager" and self._takes_fast_path(execution == "fast", releases_model, progress):
            return
        if check:
            with refused_by_model(model):
                check_target(self, reference_logits(self))

    def _takes_fast_path(
        self, is_required: bool, releases_model: bool, progress: Callable[[str], None] | None
    ) -> bool:
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
            if is_required:
                raise UnsupportedFeatureError(f"execution 'fast': {error}") from error
            return False
        self.eager_reason = ""
        if releases_model:
            self.model.forward = _no_weights
        return True

    @property
    def execution(self) -> str:
        """`fast` or `eager`: how forwards are computed."""
        return "eager" if self._fast is None else "fast"

    @property
    def num_cache_bytes_per_token(self) -> int:
        """Bytes of keys and values, all layers, that one cached token takes."""
        return self.kv_cache.num_bytes // (self.kv_cache.num_slots * self.kv_cache.capacity)

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

    @torch.no_grad()
    def embedding(self, token_ids: Tensor) -> Tensor:
        """Input embeddings, scaled as the model scales them: int64 [...] -> [..., D]."""
        embedded: Tensor = self.architecture.embedding(token_ids.to(self._device))
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
        outputs: dict[int, TargetOutput] = {}
        order = sorted(range(len(segments)), key=lambda i: self._slots[segments[i].sequence])
        for run in self._runs([segments[i] for i in order]):
            outputs[len(outputs)] = self._forward_run(run, features)
        for segment in segments:
            self._cached[segment.sequence] += len(segment.prefix_ids)
        if len(outputs) == 1 and order == list(range(len(segments))):
            return outputs[0]
        return self._reordered(segments, order, list(outputs.values()), features)

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

    def _runs(self, segments: list[Segment]) -> Iterator[list[Segment]]:
        """Split segments, sorted by slot, where their slots are not consecutive."""
        run: list[Segment] = []
        for segment in segments:
            if run and self._slots[segment.sequence] != self._slots[run[-1].sequence] + 1:
                yield run
                run = []
            run.append(segment)
        yield run

    def _forward_run(self, run: list[Segment], features: Seq[int]) -> TargetOutput:
        """One forward over sequences in consecutive slots."""
        starts = [self._cached[segment.sequence] for segment in run]
        num_tokens = max(map(len, run))
        first_slot = self._slots[run[0].sequence]
        self.kv_cache.reserve(first_slot + len(run), max(starts) + num_tokens)
        view_len = self.kv_cache.open_window(first_slot, starts, num_tokens)
        token_ids = torch.zeros(len(run), num_tokens, dtype=torch.int64)
        positions = torch.zeros(len(run), num_tokens, dtype=torch.int64)
        for row, (segment, start) in enumerate(zip(run, starts, strict=True)):
            ids = torch.tensor(segment.prefix_ids, dtype=torch.int64)
            if segment.tree is not None:
                ids = torch.cat([ids, segment.tree.token_ids])
            token_ids[row, : len(segment)] = ids
            positions[row, : len(segment)] = attention.segment_positions(segment, start)
        with self._capture(features) as captured:
            hidden = self._run_base(
                token_ids.to(self._device),
                positions.to(self._device),
                self._masks(run, starts, num_tokens, view_len),
                self.kv_cache,
            )
        flat = self._flatten(run, hidden)
        return TargetOutput(
            flat, {layer: self._flatten(run, states) for layer, states in captured.items()}, run, self.lm_head
        )

    def _run_base(self, token_ids: Tensor, positions: Tensor, mask: object, cache: object) -> Tensor:
        """The model's own forward without its output layer: [B, T] -> [B, T, D] after the final norm."""
        packed = (
            attention.packed_attention(self.model)
            if isinstance(cache, KVCache) and self._uses_packed_attention
            else nullcontext()
        )
        with packed:
            output: Any = self._base(
                input_ids=token_ids,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                **{self._cache_argument: cache},
            )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _masks(self, run: list[Segment], starts: list[int], num_tokens: int, view_len: int) -> object:
        """One additive mask, or one per layer type for models that mix full and sliding attention."""
        masks = {}
        for layer_type in self.architecture.layer_types:
            window = self.architecture.sliding_window if layer_type == "sliding_attention" else None
            plane = attention.visibility(run, starts, num_tokens, view_len, window).to(self._device)
            mask = attention.additive(plane, self._dtype)
            masks[layer_type] = mask.repeat(1, 1, self._num_groups, 1) if self._num_groups > 1 else mask
        return masks if len(masks) > 1 else masks.popitem()[1]

    @contextmanager
    def _capture(self, features: Seq[int]) -> Iterator[dict[int, Tensor]]:
        """Collect the inputs of the layers asked for during the block."""
        captured: dict[int, Tensor] = {}

        def hook_for(layer: int) -> Any:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                captured[layer] = args[0] if args else kwargs["hidden_states"]

            return hook

        with ExitStack() as stack:
            for layer in features:
                module = self.architecture.layers[layer]
                handle = module.register_forward_pre_hook(hook_for(layer), with_kwargs=True)
                stack.callback(handle.remove)
            yield captured

    def _flatten(self, run: list[Segment], states: Tensor) -> Tensor:
        """[B, T, D] with padding -> [N, D] without."""
        if len(run) == 1:
            return states[0, : len(run[0])]
        if all(len(segment) == states.shape[1] for segment in run):
            return states.reshape(-1, states.shape[2])
        return torch.cat([states[row, : len(segment)] for row, segment in enumerate(run)])

    def _reordered(
        self, segments: Seq[Segment], order: list[int], outputs: list[TargetOutput], features: Seq[int]
    ) -> TargetOutput:
        """Join the outputs of several runs, rows in the order of `segments`."""
        lengths = [len(segments[i]) for i in order]
        starts = dict(zip(order, torch.tensor([0, *lengths]).cumsum(0).tolist()[:-1], strict=True))
        rows = torch.cat(
            [torch.arange(starts[i], starts[i] + len(segment)) for i, segment in enumerate(segments)]
        ).to(self._device)
        hidden = torch.cat([output.hidden for output in outputs])[rows]
        joined = {
            layer: torch.cat([output.features[layer] for output in outputs])[rows] for layer in features
        }
        return TargetOutput(hidden, joined, segments, self.lm_head)

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
