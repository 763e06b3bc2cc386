"""The fast execution path on a CPU: a decoder's layers in one call of compiled C++.

Same weights, same cache, same rows as Hugging Face's forward; packed weights, fused projections, no padding
between sequences, and no Python between layers. Every row is computed independently of the rows beside it, so
a token's logits do not depend on the draft tree it is verified in.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UnsupportedFeatureError
from paceline.kernels import abi
from paceline.kernels.build import load_kernels
from paceline.kernels.packing import interleave, pack_bias, pack_weight
from paceline.kernels.pages import drop_pages, trim_heap
from paceline.kv_cache import KVCache
from paceline.sequence import Segment
from paceline.targets.architecture import UNLIMITED_CONTEXT, Architecture
from paceline.targets.decoder_plan import LinearPlan, NormPlan, read_plan
from paceline.tree import DraftTree

ALIGNMENT = 16
MIN_POSITIONS = 1024
TORCH_GRAIN = 32_768
"""Elements up to which a torch operation stays on the calling thread."""
_DTYPES = {torch.float32: abi.FP32, torch.bfloat16: abi.BF16}
_ACTIVATIONS = {
    "silu": abi.SILU,
    "gelu_tanh": abi.GELU_TANH,
    "gelu_erf": abi.GELU_ERF,
    "relu": abi.RELU,
}


class FastDecoder:
    """Runs the layers of one model.

    Args:
        model: a frozen causal LM on the CPU.
        architecture: its parts.
        releases: drop each weight of the model once it is packed. The model itself cannot run any more then;
            its embeddings and norms stay.
        num_threads: threads to use; by default as many as torch uses.
        progress: told when the kernels have to be compiled.

    Raises:
        UnsupportedFeatureError: this model, dtype, device or machine cannot take the fast path; says why.
    """

    def __init__(
        self,
        model: Any,
        architecture: Architecture,
        *,
        releases: bool = False,
        num_threads: int | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        weight: Tensor = architecture.lm_head.weight
        if weight.device.type != "cpu" or weight.dtype not in _DTYPES:
            raise UnsupportedFeatureError(
                f"the fast path runs fp32 and bf16 on the CPU, not {weight.dtype} on {weight.device.type}"
            )
        self._plan = read_plan(model, architecture)
        self._check_sizes(int(weight.shape[1]))
        self._library = load_kernels(progress)
        self._library.paceline_decoder_new.restype = ctypes.c_void_p
        self._dtype = weight.dtype
        self._hidden_size = int(weight.shape[1])
        self._kept: list[Tensor] = []
        self._releases = releases
        self._rotary_table: RotaryTable | None = None
        self._layers = (abi.Layer * len(self._plan.layers))()
        self._fill_layers()
        # Others ask the output layer for its shape, and where it is tied it is the input embedding too.
        self._releases = False
        self._head = self._linear(LinearPlan((weight,), (architecture.lm_head.bias,)))
        self._num_logits = int(weight.shape[0])
        threads = num_threads or torch.get_num_threads()
        self._decoder = ctypes.c_void_p(
            self._library.paceline_decoder_new(ctypes.byref(self._model()), ctypes.c_int32(threads))
        )
        weakref.finalize(self, self._library.paceline_decoder_free, self._decoder)

    def _check_sizes(self, hidden_size: int) -> None:
        """The kernels work on whole vectors."""
        sizes = {"hidden size": hidden_size, "head size": self._plan.head_dim}
        for name, size in sizes.items():
            if size % ALIGNMENT:
                raise UnsupportedFeatureError(
                    f"the fast path needs a {name} that is a multiple of {ALIGNMENT}, not {size}"
                )

    def _keep(self, tensor: Tensor | None) -> int | None:
        """Address of a tensor that lives as long as this object."""
        if tensor is None:
            return None
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _linear(self, plan: LinearPlan, arrange: Callable[[Tensor], Tensor] | None = None) -> abi.Linear:
        """Pack a layer, its outputs rearranged first where asked for."""
        weight, bias = plan.weight(), plan.bias()
        if arrange is not None:
            weight, bias = arrange(weight), None if bias is None else arrange(bias)
        packed = pack_weight(weight)
        if self._releases:
            for owner in plan.owners:
                drop_pages(owner.data)
                owner.data = owner.data.new_empty(0)
        num_out, num_in = weight.shape
        return abi.Linear(self._keep(packed), self._keep(pack_bias(bias)), num_in, num_out)

    def _norm(self, plan: NormPlan | None) -> abi.Norm:
        if plan is None:
            return abi.Norm(None, None)
        bias = None if plan.bias is None else plan.bias.contiguous()
        return abi.Norm(self._keep(plan.weight.contiguous()), self._keep(bias))

    def _fill_layers(self) -> None:
        """Pack every layer."""
        tables = self._plan.layer_types if self._plan.rotary_by_type else (None,)
        for layer, packed in zip(self._plan.layers, self._layers, strict=True):
            packed.qkv = self._linear(layer.qkv)
            packed.attention_out = self._linear(layer.attention_out)
            packed.mlp_out = self._linear(layer.mlp_out)
            packed.mlp_in = self._linear(layer.mlp_in, interleave if self._plan.is_gated else None)
            # Joining and padding leave gaps between the packed blocks.
            trim_heap()
            packed.before_attention = self._norm(layer.before_attention)
            packed.after_attention = self._norm(layer.after_attention)
            packed.before_mlp = self._norm(layer.before_mlp)
            packed.after_mlp = self._norm(layer.after_mlp)
            packed.query_norm = self._norm(layer.query_norm).weight
            packed.key_norm = self._norm(layer.key_norm).weight
            packed.window = layer.window or 0
            packed.rope = -1
            if self._plan.rotary is not None:
                packed.rope = tables.index(layer.layer_type if self._plan.rotary_by_type else None)

    def _model(self) -> abi.Model:
        plan = self._plan
        first = plan.layers[0]
        norms_whole = first.query_norm is not None and first.query_norm.weight.numel() != plan.head_dim
        return abi.Model(
            layers=self._layers,
            final_norm=self._norm(plan.final_norm),
            attention=abi.AttentionShape(
                plan.num_heads, plan.num_kv_heads, plan.head_dim, plan.scale, plan.soft_cap or 0.0
            ),
            num_layers=len(plan.layers),
            hidden_size=self._hidden_size,
            mlp_size=plan.mlp_size,
            dtype=_DTYPES[self._dtype],
            norm_kind=abi.LAYER_NORM if plan.is_layer_norm else abi.RMS_NORM,
            activation=_ACTIVATIONS[plan.activation],
            is_gated=plan.is_gated,
            is_parallel=plan.is_parallel,
            norms_whole_qk=norms_whole,
            rotary_dim=self._rotary(1).cosines.shape[-1] * 2,
            norm_eps=plan.norm_eps,
        )

    def _rotary(self, num_positions: int) -> RotaryTable:
        """Cosines and sines of the model's own rotary module for positions 0 to at least `num_positions` - 1.

        They depend on the position alone: models whose frequencies change with the length of the text end
        where that would begin (`architecture.py`). So they are computed once, in steps that double.
        """
        if self._rotary_table is not None and num_positions <= self._rotary_table.num_positions:
            return self._rotary_table
        plan = self._plan
        if plan.rotary is None:
            self._rotary_table = RotaryTable(torch.zeros(1, 1, 0), torch.zeros(1, 1, 0), UNLIMITED_CONTEXT)
            return self._rotary_table
        known = 0 if self._rotary_table is None else self._rotary_table.num_positions
        positions = torch.arange(max(2 * known, num_positions, MIN_POSITIONS))
        like = torch.empty(0, dtype=self._dtype)
        kinds: Seq[tuple[str, ...]] = [(kind,) for kind in plan.layer_types] if plan.rotary_by_type else [()]
        tables = [plan.rotary(like, positions[None], *kind) for kind in kinds]
        half = tables[0][0].shape[-1] // 2
        cosines = torch.cat([cosine[..., :half] for cosine, _ in tables]).float().contiguous()
        sines = torch.cat([sine[..., :half] for _, sine in tables]).float().contiguous()
        self._rotary_table = RotaryTable(cosines, sines, len(positions))
        return self._rotary_table

    def forward(
        self,
        segments: Seq[Segment],
        slots: Seq[int],
        starts: Seq[int],
        embed: Callable[[Tensor], Tensor],
        cache: KVCache,
        features: Seq[int],
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run all segments at once and write their keys and values at `starts` of their `slots`.

        Args:
            segments: one per sequence.
            slots: cache slot of each.
            starts: cached tokens of each.
            embed: token ids [N] -> embeddings [N, D].
            cache: with room for every segment.
            features: layers whose inputs are wanted.

        Returns:
            Hidden states [N, D] after the final norm, and layer -> [N, D].
        """
        rows = RowTable(segments, slots, starts)
        residual = self._embedded(rows, embed)
        rotary = self._rotary(max(rows.positions) + 1)
        hidden = torch.empty(len(rows), self._hidden_size, dtype=self._dtype)
        captured = {layer: torch.empty_like(hidden) for layer in features}
        layers = (ctypes.c_int32 * len(captured))(*captured)
        outputs = (ctypes.c_void_p * len(captured))(*[states.data_ptr() for states in captured.values()])
        addresses = cache.layer_addresses()
        call = abi.Forward(
            rows=rows.as_struct(),
            num_features=len(captured),
            num_positions=rotary.num_positions,
            residual=residual.data_ptr(),
            cosines=rotary.cosines.data_ptr(),
            sines=rotary.sines.data_ptr(),
            keys=ctypes.cast(addresses.keys, ctypes.c_void_p),
            values=ctypes.cast(addresses.values, ctypes.c_void_p),
            slot_stride=addresses.slot_stride,
            head_stride=addresses.head_stride,
            hidden=hidden.data_ptr(),
            feature_layers=ctypes.cast(layers, ctypes.c_void_p),
            features=ctypes.cast(outputs, ctypes.c_void_p),
        )
        self._library.paceline_decoder_forward(self._decoder, ctypes.byref(call))
        return hidden, captured

    def _embedded(self, rows: RowTable, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """fp32 [N, D]: what the first layer reads.

        A few rows at a time: torch hands larger operations to its own threads, which then go on spinning for
        a while on the very cores that the kernels' threads are about to use.
        """
        residual = torch.empty(len(rows), self._hidden_size)
        step = max(1, TORCH_GRAIN // self._hidden_size)
        for part, token_ids, positions in zip(
            torch.split(residual, step),
            torch.split(torch.tensor(rows.token_ids), step),
            torch.split(torch.tensor(rows.positions), step),
            strict=True,
        ):
            part.copy_(embed(token_ids))
            if self._plan.learned_positions is not None:
                part += self._plan.learned_positions(positions)
        return residual

    def logits(self, hidden: Tensor) -> Tensor:
        """Output layer, bias included: [..., D] -> [..., V] in the model's dtype."""
        flat = hidden.reshape(-1, self._hidden_size).to(self._dtype).contiguous()
        out = torch.empty(flat.shape[0], self._num_logits, dtype=self._dtype)
        self._library.paceline_decoder_multiply(
            self._decoder,
            ctypes.byref(self._head),
            ctypes.c_void_p(flat.data_ptr()),
            ctypes.c_int32(flat.shape[0]),
            ctypes.c_void_p(out.data_ptr()),
        )
        return out.view(*hidden.shape[:-1], self._num_logits)


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Cosines and sines by position.

    Attributes:
        cosines: fp32 [tables, num_positions, rotary_dim / 2].
        sines: likewise.
        num_positions: positions that it holds.
    """

    cosines: Tensor
    sines: Tensor
    num_positions: int


class RowTable:
    """Tokens, places and sight of every row of a forward (see attention.hpp).

    Plain lists: a round has a few dozen rows, for which tensor operations cost more than they compute.
    """

    def __init__(self, segments: Seq[Segment], slots: Seq[int], starts: Seq[int]) -> None:
        self.token_ids: list[int] = []
        self.positions: list[int] = []
        self._slots: list[int] = []
        self._writes: list[int] = []
        self._num_shared: list[int] = []
        self._tail_starts = [0]
        self._tail: list[int] = []
        for segment, slot, start in zip(segments, slots, starts, strict=True):
            root = start + len(segment.prefix_ids)
            self._slots += [slot] * len(segment)
            self._writes += range(start, start + len(segment))
            self._add_prefix(segment.prefix_ids, start)
            if segment.tree is not None:
                self._add_tree(segment.tree, root)
        columns = (self._slots, self._writes, self.positions, self._num_shared, self._tail_starts, self._tail)
        self._arrays = [array("i", column) for column in columns]

    def __len__(self) -> int:
        """Rows."""
        return len(self.token_ids)

    def _add_prefix(self, token_ids: Seq[int], start: int) -> None:
        """Committed tokens: each sees everything up to itself, and all of that lies in order."""
        end = start + len(token_ids)
        self.token_ids += token_ids
        self.positions += range(start, end)
        self._num_shared += range(start + 1, end + 1)
        self._tail_starts += [self._tail_starts[-1]] * len(token_ids)

    def _add_tree(self, tree: DraftTree, root: int) -> None:
        """Tree nodes: each sees what lies before the root, its ancestors from there down, and itself."""
        paths: list[list[int]] = []
        for node, parent in enumerate(tree.parents.tolist()):
            path = [root] if parent < 0 else [*paths[parent], root + node]
            paths.append(path)
            self.positions.append(root + len(path) - 1)
            self._tail += path
            self._tail_starts.append(len(self._tail))
        self.token_ids += tree.token_ids.tolist()
        self._num_shared += [root] * len(paths)

    def as_struct(self) -> abi.Rows:
        """For the kernels; valid as long as this table lives."""
        return abi.Rows(len(self), *[column.buffer_info()[0] for column in self._arrays])
