"""An EAGLE head's layer in one call of the compiled kernels (`kernels/decoder.cpp`).

In torch a level of a draft is some thirty small operations, each of which may wake torch's threads; here it
is one call on packed weights, with the threads and the attention of the target's own fast path.
"""

from __future__ import annotations

import ctypes
import weakref

import torch
from torch import Tensor, nn

from paceline.drafters.eagle_cache import EagleCache, Sight
from paceline.heads.eagle import EagleHead, EagleStates
from paceline.kernels import abi
from paceline.kernels.build import loaded_kernels
from paceline.kernels.packing import interleave, pack_bias, pack_weight
from paceline.kernels.selection import DTYPES

ALIGNMENT = 16
MIN_POSITIONS = 1024


class CompiledEagleLayer:
    """A packed copy of a head's layer.

    Args:
        head: frozen, on the CPU.
        library: the kernels.
    """

    def __init__(self, head: EagleHead, library: ctypes.CDLL) -> None:
        self._head = head
        self._library = library
        self._dtype = head.dtype
        self._kept: list[Tensor] = []
        self._cosines = self._sines = torch.empty(0, 0)
        config, layer = head.config, head.layer
        attention, mlp = layer.self_attn, layer.mlp
        is_joined = config.kind == "eagle3"
        packed = abi.Layer(
            qkv=self._joined(attention.q_proj, attention.k_proj, attention.v_proj),
            attention_out=self._joined(attention.o_proj),
            mlp_in=self._pack(interleave(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])), None),
            mlp_out=self._joined(mlp.down_proj),
            before_attention=self._norm(layer.hidden_norm if is_joined else None),
            after_attention=self._norm(None),
            before_mlp=self._norm(layer.post_attention_layernorm),
            after_mlp=self._norm(None),
            query_norm=self._norm(attention.q_norm if config.normalises_heads else None).weight,
            key_norm=self._norm(attention.k_norm if config.normalises_heads else None).weight,
            window=0,
            rope=0,
        )
        self._layers = (abi.Layer * 1)(packed)
        model = abi.Model(
            layers=self._layers,
            final_norm=self._norm(head.norm if is_joined else None),
            attention=abi.AttentionShape(
                config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim**-0.5, 0.0
            ),
            num_layers=1,
            hidden_size=config.hidden_size,
            mlp_size=config.intermediate_size,
            dtype=DTYPES[self._dtype],
            norm_kind=abi.RMS_NORM,
            activation=abi.SILU,
            is_gated=True,
            is_parallel=False,
            norms_whole_qk=False,
            rotary_dim=config.head_dim,
            norm_eps=config.norm_eps,
            joins_embedding=is_joined,
            keeps_normed=config.normalises_residual,
            embedding_norm=self._norm(layer.input_layernorm if is_joined else None),
        )
        library.paceline_decoder_new.restype = ctypes.c_void_p
        self._decoder = ctypes.c_void_p(
            library.paceline_decoder_new(ctypes.byref(model), ctypes.c_int32(torch.get_num_threads()))
        )
        weakref.finalize(self, library.paceline_decoder_free, self._decoder)

    @classmethod
    def where_possible(cls, head: EagleHead) -> CompiledEagleLayer | None:
        """Packed, when the kernels are loaded (the target is on the fast path) and sizes fit; else None."""
        library, config = loaded_kernels(), head.config
        sizes = (config.hidden_size, config.head_dim)
        if library is None or head.fc.weight.device.type != "cpu" or head.dtype not in DTYPES:
            return None
        return None if any(size % ALIGNMENT for size in sizes) else cls(head, library)

    def drop_layer(self) -> None:
        """Free the head's own copy of the packed weights, for heads that nobody else uses."""
        for parameter in self._head.layer.parameters():
            parameter.data = parameter.data.new_empty(0)

    @torch.inference_mode()
    def step(self, embedding: Tensor, state: Tensor, cache: EagleCache, sight: Sight) -> EagleStates:
        """One step; keys and values are written to the cache.

        Args:
            embedding: [B, T, D], as for `EagleHead.forward`.
            state: [B, T, D], likewise.
            cache: with room for these positions.
            sight: where they stand and what they see.

        Returns:
            States [B, T, D]; those that are fed back in fp32.
        """
        if self._head.config.kind == "eagle":
            joined = torch.cat([embedding, state.to(embedding.dtype)], dim=-1)
            state = self._head.fc(joined.to(self._dtype))
        # Copies: the residual is written over.
        residual = state.flatten(0, 1).to(torch.float32, copy=True).contiguous()
        embedded = embedding.flatten(0, 1).to(torch.float32).contiguous()
        rows = sight.rows(cache)
        self._extend_rotary(sight.num_places)
        hidden = torch.empty(residual.shape, dtype=self._dtype)
        keys, values = (
            (ctypes.c_void_p * 1)(cache.keys.data_ptr()),
            (ctypes.c_void_p * 1)(cache.values.data_ptr()),
        )
        call = abi.Forward(
            rows=abi.Rows(len(residual), *[column.data_ptr() for column in rows]),
            num_features=0,
            num_positions=len(self._cosines),
            residual=residual.data_ptr(),
            cosines=self._cosines.data_ptr(),
            sines=self._sines.data_ptr(),
            keys=ctypes.cast(keys, ctypes.c_void_p),
            values=ctypes.cast(values, ctypes.c_void_p),
            slot_stride=cache.keys.stride(0),
            head_stride=cache.keys.stride(1),
            hidden=hidden.data_ptr(),
            embedding=embedded.data_ptr(),
        )
        self._library.paceline_decoder_forward(self._decoder, ctypes.byref(call))
        shape = embedding.shape
        return EagleStates(residual.view(shape), hidden.view(shape))

    def _extend_rotary(self, num_positions: int) -> None:
        """Cosines and sines of positions up to the last one, fp32 [P, d / 2], in steps that double."""
        if num_positions <= len(self._cosines):
            return
        wanted = max(MIN_POSITIONS, num_positions, 2 * len(self._cosines))
        half = self._head.config.head_dim // 2
        tables = self._head.rotary(torch.arange(wanted)[None])
        self._cosines, self._sines = (table[0, 0, :, :half].contiguous() for table in tables)

    def _joined(self, *layers: nn.Linear) -> abi.Linear:
        """Several layers of the same input as one."""
        biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        weight = torch.cat([layer.weight for layer in layers])
        return self._pack(weight, torch.cat(biases) if biases else None)

    def _pack(self, weight: Tensor, bias: Tensor | None) -> abi.Linear:
        num_out, num_in = weight.shape
        return abi.Linear(
            self._keep(pack_weight(weight.detach())),
            self._keep(pack_bias(None if bias is None else bias.detach())),
            num_in,
            num_out,
        )

    def _norm(self, norm: nn.Module | None) -> abi.Norm:
        weight = getattr(norm, "weight", None)
        return abi.Norm(None if weight is None else self._keep(weight.detach().float().contiguous()), None)

    def _keep(self, tensor: Tensor | None) -> int | None:
        """Address of a tensor that lives as long as this object."""
        if tensor is None:
            return None
        self._kept.append(tensor)
        return tensor.data_ptr()
