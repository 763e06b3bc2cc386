"""What a static forward is told: one vector of numbers a round, laid out the same way every time.

Per sequence its cached length, per row a token and the parent node; everything else that a forward needs
follows from these on the device (`targets.tree_rows`). So a round costs one copy to the device, whatever the
batch, and the host builds neither masks nor positions.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.sequence import Segment
from paceline.targets.buckets import Bucket

PADDING = -2
"""Parent of a row that stands for nothing; a root's is -1."""


@dataclass(frozen=True, slots=True)
class StagedRows:
    """Views of one int64 vector.

    Attributes:
        vector: [B + 3 * B * W], all of it.
        starts: [B], cached tokens; 0 where no sequence is fed.
        token_ids: [B, W].
        parents: [B, W], as in a draft tree; `PADDING` where there is no node.
        order: [B * W], row of the flattened batch that each row of the output is; the rest is 0.
    """

    vector: Tensor
    starts: Tensor
    token_ids: Tensor
    parents: Tensor
    order: Tensor

    @classmethod
    def empty(cls, bucket: Bucket, device: torch.device) -> StagedRows:
        """Rows that stand for nothing."""
        batch, width = bucket.batch_size, bucket.width
        num_rows = batch * width
        vector = torch.zeros(batch + 3 * num_rows, dtype=torch.int64, device=device)
        sizes = [batch, num_rows, num_rows, num_rows]
        starts, token_ids, parents, order = torch.split(vector, sizes)
        parents.fill_(PADDING)
        return cls(vector, starts, token_ids.view(batch, width), parents.view(batch, width), order)


def stage(segments: Seq[Segment], slots: Seq[int], starts: Seq[int], bucket: Bucket) -> StagedRows:
    """Lay out the trees of a round on the host; as many tensor operations for one sequence as for many.

    Args:
        segments: one tree per sequence, no prefixes.
        slots: cache slot of each: its row of the batch.
        starts: cached tokens of each.
        bucket: that holds them.
    """
    staged = StagedRows.empty(bucket, torch.device("cpu"))
    trees = [segment.tree for segment in segments if segment.tree is not None and not segment.prefix_ids]
    if len(trees) != len(segments):
        raise ShapeError("a static forward takes draft trees only, without uncached tokens before them")
    lengths = [len(tree) for tree in trees]
    shifts, num_rows = [], 0
    for slot, length in zip(slots, lengths, strict=True):
        shifts.append(slot * bucket.width - num_rows)
        num_rows += length
    order = staged.order[:num_rows]
    torch.arange(num_rows, out=order)
    order += torch.repeat_interleave(torch.tensor(shifts), torch.tensor(lengths))
    staged.token_ids.view(-1)[order] = torch.cat([tree.token_ids for tree in trees])
    staged.parents.view(-1)[order] = torch.cat([tree.parents for tree in trees])
    staged.starts[torch.tensor(slots)] = torch.tensor(starts)
    return staged
