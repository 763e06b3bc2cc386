"""Token histories of tree nodes: what a processor has to know about the path that leads to each node."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.sequence import Sequence
from paceline.tree import DraftTree

NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class NodePaths:
    """The drafted tokens between the root and each node, root excluded: it is committed already.

    Attributes:
        token_ids: int64 [N + 1, K], path tokens, then the root's token as padding.
        is_drafted: bool [N + 1, K], false for padding.
    """

    token_ids: Tensor
    is_drafted: Tensor

    @classmethod
    def of(cls, tree: DraftTree, device: torch.device) -> NodePaths:
        """Paths of a tree, on `device`."""
        table = tree.path_table[:, 1:]
        is_drafted = table >= 0
        # Padding reads node 0, the root, of which every history holds one.
        return cls(tree.token_ids[table.clamp(min=0)].to(device), is_drafted.to(device))


@dataclass(frozen=True, slots=True)
class NodeSuffixes:
    """The newest tokens before each node's prediction, and the path tokens with as much context before them.

    Attributes:
        last_ids: int64 [N + 1, n], the n tokens that end with the node; NO_TOKEN where the text is shorter.
        path_ids: int64 [N + 1, n + K], n committed tokens, then the path to the node, padded with NO_TOKEN.
    """

    last_ids: Tensor
    path_ids: Tensor

    @classmethod
    def of(cls, tree: DraftTree, sequence: Sequence, length: int, device: torch.device) -> NodeSuffixes:
        """Suffixes of `length` tokens of all nodes, on `device`."""
        tail = last_token_ids(sequence, length)
        context = torch.tensor([NO_TOKEN] * (length - len(tail)) + tail, dtype=torch.int64)
        table = tree.path_table[:, 1:]
        drafted = tree.token_ids[table.clamp(min=0)].masked_fill(table < 0, NO_TOKEN)
        path_ids = torch.cat([context.expand(len(tree), length), drafted], dim=1)
        last_ids = path_ids.gather(1, tree.depths[:, None] + torch.arange(length))
        return cls(last_ids.to(device), path_ids.to(device))


def last_token_ids(sequence: Sequence, length: int) -> list[int]:
    """The newest `length` committed tokens, fewer when there are not so many; does not copy the rest."""
    if length == 0:
        return []
    output = sequence.output_ids[-length:]
    missing = length - len(output)
    return sequence.prompt_ids[-missing:] + output if missing else output


class GrowingIds:
    """A list of token ids on a device; appending costs no more than what is appended, on average."""

    def __init__(self, ids: Iterable[int], device: torch.device) -> None:
        self._buffer = torch.tensor(list(ids), dtype=torch.int64, device=device)
        self._length = self._buffer.shape[0]

    def append(self, ids: Seq[int]) -> Tensor:
        """Add ids at the end; returns them as a tensor."""
        start, needed = self._length, self._length + len(ids)
        if needed > self._buffer.shape[0]:
            grown = self._buffer.new_empty(2 * needed)
            grown[:start] = self._buffer[:start]
            self._buffer = grown
        added = torch.tensor(list(ids), dtype=torch.int64, device=self._buffer.device)
        self._buffer[start:needed] = added
        self._length = needed
        return added

    @property
    def ids(self) -> Tensor:
        """int64 [T], a view."""
        return self._buffer[: self._length]
