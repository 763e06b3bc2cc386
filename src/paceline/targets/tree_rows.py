"""Positions, places in the cache and masks of padded draft trees, computed on the device from parents alone.

This is the part of a captured forward that differs between rounds, written without a value that the host
knows: shapes come from the bucket, everything else from staged tensors. The eager counterpart, on the host
and for prompts too, is `targets.attention`; tests hold the two against each other.

Rows that stand for nothing (padding of a tree, or a slot that is not fed) are trees of one node: their
position is one that their sequence has, so that none is outside a table of learned positions. They see the
text before the root and themselves, as far as the view reaches; a row that sees nothing attends evenly, since
masks are finite, and nobody reads it. They write to the tail of their slot, which belongs to no text.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.targets.staged_rows import PADDING, StagedRows


class TreeRows:
    """Geometry of the rows of one forward.

    Args:
        staged: rows, on the device.
        tail: first cache position of every slot that belongs to no text.

    Attributes:
        depths: int64 [B, W], 0 for roots and padding.
        positions: int64 [B, W], in the text.
        writes: int64 [B, W], in the cache; different for the rows of a sequence.
    """

    def __init__(self, staged: StagedRows, tail: int) -> None:
        parents, starts = staged.parents, staged.starts[:, None]
        self._starts = starts
        self._reach = reach(parents)  # [B, W, W]
        self.depths = self._reach.sum(dim=2) - 1
        self.positions = starts + self.depths
        lanes = torch.arange(parents.shape[1], device=parents.device)
        bases = starts.expand_as(parents).masked_fill(parents == PADDING, tail)
        self.writes = bases + lanes

    def visibility(self, view_len: int, window: int | None) -> Tensor:
        """Which cached and new positions each row may read: the text before its root, and its ancestors.

        Args:
            view_len: positions that attention reads (S).
            window: sliding-window size; None for full attention.

        Returns:
            bool [B, W, S].
        """
        width = self.depths.shape[1]
        keys = torch.arange(view_len, device=self.depths.device)
        offsets = keys - self._starts  # [B, S], negative before the root
        nodes = offsets.clamp(0, width - 1)
        is_node = (offsets >= 0) & (offsets < width)
        ancestors = self._reach.gather(2, nodes[:, None].expand(-1, width, -1))
        visible = (offsets < 0)[:, None] | (is_node[:, None] & ancestors)
        if window is not None:
            key_positions = torch.where(offsets < 0, keys, self._starts + self.depths.gather(1, nodes))
            visible &= self.positions[:, :, None] - key_positions[:, None] < window
        return visible


def reach(parents: Tensor) -> Tensor:
    """Which nodes are above each one, or itself: int64 [B, W] parents -> bool [B, W, W].

    A node sees what the node half-way up sees, so the number of steps is the logarithm of the width and not
    the depth of the trees, which only their values tell.
    """
    batch, width = parents.shape
    nodes = torch.arange(width, device=parents.device)
    above = torch.where(parents < 0, nodes, parents)  # roots lead to themselves
    matrix = (nodes[:, None] == nodes).expand(batch, width, width)
    num_levels = 1
    while num_levels < width:
        matrix = matrix | matrix.gather(1, above[:, :, None].expand(-1, -1, width))
        above = above.gather(1, above)
        num_levels *= 2
    return matrix
