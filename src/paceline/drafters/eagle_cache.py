"""Keys and values of a draft layer: committed positions first, the nodes of the round behind them.

Committed positions hold what the target's own features gave; what the drafter made of its own guesses lies
behind them and is written over in the next round. Attention reads the buffer where it lies: nothing is
copied but when it has to grow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from paceline.sequence import Sequence
from paceline.transfers import upload

BLOCK = 256
"""Positions by which the buffer grows."""


@dataclass(frozen=True, slots=True)
class Sight:
    """Where T positions of B sequences stand in their lanes, and what they see.

    Attributes:
        sequences: B.
        starts: int64 [B], place of the first of the T positions, which lie side by side.
        num_in_order: int64 [B, T], how many places from the first one on each position sees.
        tail: int64 [B, T, k], further places that it sees, in the order of the text, itself the last; none
            where it is among those in order.
    """

    sequences: list[Sequence]
    starts: Tensor
    num_in_order: Tensor
    tail: Tensor

    @property
    def num_places(self) -> int:
        """C: places of the longest lane, these positions included."""
        return int(self.starts.max()) + self.num_in_order.shape[1]

    @property
    def visible(self) -> Tensor:
        """Bool [B, T, C]: which places each position sees."""
        seen = torch.arange(self.num_places) < self.num_in_order[:, :, None]
        return seen.scatter(2, self.tail, value=True) if self.tail.shape[2] else seen

    def rows(self, cache: EagleCache) -> list[Tensor]:
        """Lane, place, position, places in order, ends of tails and tails: int32, for the kernels."""
        num_sequences, width, num_behind = self.tail.shape
        lanes = torch.tensor([cache.lane(sequence) for sequence in self.sequences])
        places = self.starts[:, None] + torch.arange(width)
        columns = (
            lanes[:, None].expand(num_sequences, width),
            places,
            self.num_in_order + (num_behind - 1),
            self.num_in_order,
            torch.arange(num_sequences * width + 1) * num_behind,
            self.tail,
        )
        return [column.to(torch.int32).contiguous() for column in columns]


class EagleCache:
    """A lane for every sequence.

    Args:
        num_kv_heads: K.
        head_dim: d.
        dtype: of keys and values.
        device: likewise.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        # Keys and values, lanes, heads, positions.
        self._buffer = torch.zeros(2, 0, num_kv_heads, 0, head_dim, dtype=dtype, device=device)
        self._lanes: dict[Sequence, int] = {}
        self._free: list[int] = []
        self.lengths: dict[Sequence, int] = {}

    def open(self, sequences: list[Sequence], num_positions: int) -> None:
        """Give every sequence a lane, and all lanes room for so many positions behind the longest one."""
        for sequence in sequences:
            if sequence not in self._lanes:
                if not self._free:
                    self._free.append(len(self._lanes))
                lane = self._lanes[sequence] = self._free.pop()
                self.lengths[sequence] = 0
                # What is masked is multiplied by nothing, and nothing times a former owner's NaN is NaN.
                self._buffer[:, lane : lane + 1] = 0
        longest = max(self.lengths[sequence] for sequence in sequences)
        self._grow(max(self._lanes.values()) + 1, longest + num_positions)

    @property
    def keys(self) -> Tensor:
        """[lanes, K, places, d]."""
        return self._buffer[0]

    @property
    def values(self) -> Tensor:
        """[lanes, K, places, d]."""
        return self._buffer[1]

    def lane(self, sequence: Sequence) -> int:
        """Lane of an open sequence."""
        return self._lanes[sequence]

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence; unknown ones are fine."""
        if sequence in self._lanes:
            self._free.append(self._lanes.pop(sequence))
            del self.lengths[sequence]

    def attend(self, sight: Sight, visible: Tensor, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Write keys and values, then attend to what is visible.

        Args:
            sight: where the T positions of B sequences stand.
            visible: its `visible`, on the device.
            queries: [B, H, T, d].
            keys: [B, K, T, d].
            values: [B, K, T, d].

        Returns:
            [B, H, T, d].
        """
        lanes, starts = [self._lanes[sequence] for sequence in sight.sequences], sight.starts
        num_new, num_places = keys.shape[2], visible.shape[2]
        for number, (lane, start) in enumerate(zip(lanes, starts.tolist(), strict=True)):
            self._buffer[0, lane, :, start : start + num_new] = keys[number]
            self._buffer[1, lane, :, start : start + num_new] = values[number]
        first, last = lanes[0], lanes[-1]
        if lanes == list(range(first, last + 1)):
            kept = self._buffer[:, first : last + 1, :, :num_places]
        else:
            index = upload(torch.tensor(lanes), self._buffer.device)
            kept = self._buffer[:, :, :, :num_places].index_select(1, index)
        return functional.scaled_dot_product_attention(
            queries, kept[0], kept[1], attn_mask=visible[:, None], enable_gqa=True
        )

    def _grow(self, num_lanes: int, num_places: int) -> None:
        """Make room; what is there is copied."""
        _, lanes, heads, places, size = self._buffer.shape
        if num_lanes <= lanes and num_places <= places:
            return
        wanted = max(places, -(-num_places // BLOCK) * BLOCK)
        larger = self._buffer.new_zeros(2, max(lanes, num_lanes), heads, wanted, size)
        larger[:, :lanes, :, :places] = self._buffer
        self._buffer = larger
