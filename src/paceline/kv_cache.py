"""Keys and values of the running sequences, preallocated and written in place.

All calls that Hugging Face models make on their cache land in `KVCache.update`; that API moves between
releases (`past_key_values` became `cache`), so nothing else in the project touches it.

One tensor holds the keys and values of all layers that share a shape: [G, slots, H, S, D], G counting (layer,
key or value) pairs. A sequence owns one slot. Compacting an accepted path or moving a sequence to another
slot is then one indexed copy per shape, not two per layer, and a forward reads plain views: nothing is
concatenated or cloned.

On a CPU the tensor has room for far more than is reserved: pages that nobody has written to take no memory,
so that texts and sequences are added without moving what is there.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from ctypes import c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from paceline.errors import IncompatibleModelError
from paceline.kernels.cache import compact_rows, copy_lane
from paceline.kernels.pages import lazy_zeros

BLOCK_LEN = 128
ROOM_SLOTS = 64
ROOM_LEN = 8192
"""Slots and positions that the buffers of a CPU have room for; beyond, they move to twice as much."""


@dataclass(frozen=True, slots=True)
class Growth:
    """How the buffers grow. Growing moves them, after which captured forwards have to be captured anew.

    Attributes:
        block_len: capacity is a multiple of it.
        tail_len: positions at the end of every slot that no text uses: rows that stand for nothing write
            there.
        doubles_slots: the number of slots is a power of two.
        is_lazy: on a CPU, buffers have room to spare; memory is taken as it is written.
    """

    block_len: int = BLOCK_LEN
    tail_len: int = 0
    doubles_slots: bool = False
    is_lazy: bool = True

    def slots_for(self, num_sequences: int) -> int:
        """Slots to reserve for so many sequences."""
        return 1 << (num_sequences - 1).bit_length() if self.doubles_slots else num_sequences

    def capacity_for(self, length: int) -> int:
        """Positions to reserve for texts of this length."""
        return -(-(length + self.tail_len) // self.block_len) * self.block_len


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Heads and head sizes of one layer's keys and values."""

    num_heads: int
    key_dim: int
    value_dim: int


@dataclass(slots=True)
class WriteWindow:
    """Where the forward in flight writes: consecutive slots, one start position each.

    Attributes:
        first_slot: slot of row 0 of the batch.
        starts: cached length of each row.
        num_tokens: tokens per row, padding included.
        view_len: positions that attention reads.
        positions: int64 [B, T] when the starts differ or only the device knows them, else None.
        rows: int64 [B, 1], numbers of the rows, with `positions`.
    """

    first_slot: int
    starts: Seq[int]
    num_tokens: int
    view_len: int
    positions: Tensor | None
    rows: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerAddresses:
    """Where kernels find the cache.

    Attributes:
        keys: array of pointers, one per layer, to [slots, H, S, D].
        values: likewise.
        slot_stride: elements from one slot to the next.
        head_stride: elements from one head to the next.
    """

    keys: Any
    values: Any
    slot_stride: int
    head_stride: int


class ShapeRecorder(Cache):  # type: ignore[misc]
    """Stand-in cache of the very first forward: notes each layer's shapes and stores nothing."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: dict[int, LayerShape] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Note the shapes of a layer and hand its states back (signature is Hugging Face's)."""
        self.shapes[layer_idx] = LayerShape(key_states.shape[1], key_states.shape[3], value_states.shape[3])
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing is ever stored."""
        return 0


class KVCache(Cache):  # type: ignore[misc]
    """Slots of preallocated keys and values; see the module docstring for the layout.

    Attributes:
        num_slots: sequences that are reserved.
        capacity: positions of a slot that are reserved, the tail included.
        generation: changes whenever the buffers move.
    """

    def __init__(
        self,
        shapes: dict[int, LayerShape],
        dtype: torch.dtype,
        device: torch.device,
        growth: Growth | None = None,
    ) -> None:
        super().__init__(layers=[])
        if sorted(shapes) != list(range(len(shapes))) or not shapes:
            raise IncompatibleModelError(
                f"only layers {sorted(shapes)} keep keys and values: every layer must, for a draft tree to "
                "be rolled back (linear-attention and state-space layers cannot)"
            )
        self._dtype, self._device = dtype, device
        self._growth = growth or Growth()
        # (heads, size) -> members; a member is (layer, is_value).
        self._members: dict[tuple[int, int], list[tuple[int, bool]]] = {}
        for layer, shape in shapes.items():
            self._members.setdefault((shape.num_heads, shape.key_dim), []).append((layer, False))
            self._members.setdefault((shape.num_heads, shape.value_dim), []).append((layer, True))
        self._buffers: dict[tuple[int, int], Tensor] = {}
        self._keys: list[Tensor] = [torch.empty(0)] * len(shapes)
        self._values: list[Tensor] = [torch.empty(0)] * len(shapes)
        self._window: WriteWindow | None = None
        self._addresses: LayerAddresses | None = None
        self.num_slots = 0
        self.capacity = 0
        self.generation = 0
        # Slots and positions of the buffers as they are.
        self._room = (0, 0)
        self.reserve(1, 1)

    @property
    def num_bytes_per_token(self) -> int:
        """Bytes of one position of one slot, all layers."""
        num_numbers = sum(heads * size * len(members) for (heads, size), members in self._members.items())
        return num_numbers * self._dtype.itemsize

    @property
    def tail(self) -> int:
        """First position of every slot that no text uses."""
        return self.capacity - self._growth.tail_len

    @torch.inference_mode()
    def reserve(self, num_slots: int, length: int) -> None:
        """Make room for `num_slots` sequences of `length` tokens, in whole blocks; existing contents stay."""
        num_slots = max(self._growth.slots_for(num_slots), self.num_slots)
        capacity = max(self._growth.capacity_for(length), self.capacity)
        if (num_slots, capacity) == (self.num_slots, self.capacity):
            return
        if num_slots > self._room[0] or capacity > self._room[1]:
            self._move_to(num_slots, capacity)
        self.num_slots, self.capacity = num_slots, capacity

    def _move_to(self, num_slots: int, capacity: int) -> None:
        """Take larger buffers and copy everything that is there."""
        for shape, members in self._members.items():
            num_heads, size = shape
            grown = self._zeros(len(members), num_slots, num_heads, capacity, size)
            if shape in self._buffers:
                part = self._buffers[shape][:, : self.num_slots, :, : self.capacity]
                grown[:, : self.num_slots, :, : self.capacity] = part
            self._buffers[shape] = grown
            for number, (layer, is_value) in enumerate(members):
                (self._values if is_value else self._keys)[layer] = grown[number]
        rooms = [(buffer.shape[1], buffer.shape[3]) for buffer in self._buffers.values()]
        self._room = (min(slots for slots, _ in rooms), min(length for _, length in rooms))
        self.generation += 1
        self._addresses = None

    def _zeros(self, num_members: int, num_slots: int, num_heads: int, capacity: int, size: int) -> Tensor:
        """A buffer: with room to spare where that takes no memory.

        Zeros, not empty: attention multiplies masked positions by exactly 0, and 0 * NaN would be NaN.
        """
        if self._device.type == "cpu" and self._growth.is_lazy:
            slots = max(ROOM_SLOTS, 2 * num_slots if num_slots > ROOM_SLOTS else 0)
            length = max(ROOM_LEN, 2 * capacity if capacity > ROOM_LEN else 0)
            roomy = lazy_zeros((num_members, slots, num_heads, length, size), self._dtype)
            if roomy is not None:
                return roomy
        shape = (num_members, num_slots, num_heads, capacity, size)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def open_window(self, first_slot: int, starts: Seq[int], num_tokens: int) -> int:
        """Announce the next forward: rows `first_slot...` each write `num_tokens` at their own start.

        Returns:
            The number of positions that attention will read (the width of the mask).
        """
        view_len = max(starts) + num_tokens
        self.reserve(first_slot + len(starts), view_len)
        positions = rows = None
        if min(starts) != max(starts):
            offsets = torch.arange(num_tokens, device=self._device)
            positions = torch.tensor(starts, device=self._device)[:, None] + offsets
            rows = torch.arange(len(starts), device=self._device)[:, None]
        self._window = WriteWindow(first_slot, starts, num_tokens, view_len, positions, rows)
        return view_len

    def open_static_window(self, positions: Tensor, view_len: int) -> None:
        """Announce a forward whose places only the device knows: row b of the batch writes to slot b.

        Room must have been reserved. The window holds no number that changes between rounds, so a captured
        forward stays right; a model that asks the cache for its length is told 0, which the check at load
        time finds out if it matters.

        Args:
            positions: int64 [B, T] on the device, where each token's keys and values go.
            view_len: positions that attention will read.
        """
        batch, num_tokens = positions.shape
        rows = torch.arange(batch, device=positions.device)[:, None]
        self._window = WriteWindow(0, (0,), num_tokens, view_len, positions, rows)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new states in place and return views over all positions (signature is Hugging Face's).

        Args:
            key_states: [B, H, T, D].
            value_states: [B, H, T, D].
            layer_idx: which layer.
            args: cache arguments of older releases, not needed here.
            kwargs: cache arguments of newer releases, not needed here.
        """
        window = self._window
        if window is None:
            raise IncompatibleModelError("the model wrote to its cache outside of a paceline forward")
        return (
            self._write(self._keys[layer_idx], key_states, window),
            self._write(self._values[layer_idx], value_states, window),
        )

    def _write(self, layer_buffer: Tensor, states: Tensor, window: WriteWindow) -> Tensor:
        """Copy `states` [B, H, T, D] into the window's slots; return the readable view [B, H, S, D]."""
        slots = layer_buffer[window.first_slot : window.first_slot + states.shape[0]]
        if window.positions is None:
            start = window.starts[0]
            slots[:, :, start : start + window.num_tokens] = states
        else:
            slots.transpose(1, 2)[window.rows, window.positions] = states.transpose(1, 2)
        return slots[:, :, : window.view_len]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Cached length of the window's first row, for models that build positions themselves."""
        return 0 if self._window is None else self._window.starts[0]

    def layer_addresses(self) -> LayerAddresses:
        """Where the buffers are now; they move when the cache grows."""
        if self._addresses is None:
            first = self._keys[0]
            self._addresses = LayerAddresses(
                (c_void_p * len(self._keys))(*[keys.data_ptr() for keys in self._keys]),
                (c_void_p * len(self._values))(*[values.data_ptr() for values in self._values]),
                first.stride(0),
                first.stride(1),
            )
        return self._addresses

    @torch.inference_mode()
    def compact(self, slot: int, start: int, path: Seq[int]) -> None:
        """Move the tree nodes `path` of a slot to consecutive positions.

        Args:
            slot: whose cache.
            start: position of the tree's root.
            path: kept nodes, parents first; node i was written at `start + i`.
        """
        for buffer in self._buffers.values():
            compact_rows(buffer[:, slot], start, path)

    @torch.inference_mode()
    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of slot `source` over slot `target`."""
        for buffer in self._buffers.values():
            copy_lane(buffer[:, source, :, :length], buffer[:, target, :, :length])
