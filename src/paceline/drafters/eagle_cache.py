"""Keys and values of a draft layer: committed positions first, the nodes of the round behind them.

Committed positions hold what the target's own features gave; what the drafter made of its own guesses lies
behind them and is written over in the next round. Attention reads the buffer where it lies: nothing is
copied but when it has to grow.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from paceline.sequence import Sequence
from paceline.transfers import upload

BLOCK = 256
"""Positions by which the buffer grows."""


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

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence; unknown ones are fine."""
        if sequence in self._lanes:
            self._free.append(self._lanes.pop(sequence))
            del self.lengths[sequence]

    def attend(
        self,
        sequences: list[Sequence],
        starts: Tensor,
        visible: Tensor,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """Write keys and values, then attend to what is visible.

        Args:
            sequences: B.
            starts: int64 [B], place of the first of the T positions in each lane.
            visible: bool [B, T, C], which of the first C places each position sees.
            queries: [B, H, T, d].
            keys: [B, K, T, d].
            values: [B, K, T, d].

        Returns:
            [B, H, T, d].
        """
        lanes = [self._lanes[sequence] for sequence in sequences]
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
