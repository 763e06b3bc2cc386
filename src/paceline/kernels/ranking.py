"""The ranking of a speculated vocabulary on a CPU: scores of all entries, their mass, the best of them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.kernels import abi
from paceline.kernels.build import loaded_kernels
from paceline.kernels.packing import PAIR, pack_bias, pack_weight
from paceline.kernels.selection import DTYPES

_TILE_ROWS = 16


@dataclass(frozen=True, slots=True)
class Ranked:
    """Chosen entries of M states.

    Attributes:
        entry_ids: int64 [M, k], ascending; [G, k] where groups share them.
        log_share: fp32 [M], logarithm of the part of a state's mass that its chosen entries hold.
    """

    entry_ids: Tensor
    log_share: Tensor


class CompiledRanking:
    """Keeps the table packed as the kernel reads it.

    Args:
        table: [V, width], fp32 or bf16, on the CPU.
        bias: [V], added to the scores.
    """

    def __init__(self, table: Tensor, bias: Tensor | None = None) -> None:
        if table.dtype not in DTYPES or table.dim() != 2:
            raise ShapeError(f"table is {table.dtype} {tuple(table.shape)}: give fp32 or bf16 [V, width]")
        self.num_entries, self.width = table.shape
        self._dtype = table.dtype
        self._packed = pack_weight(table.detach())
        self._bias = pack_bias(None if bias is None else bias.detach())
        self._stride = self.width if self._dtype is torch.float32 else -(-self.width // PAIR) * PAIR
        self._scores = torch.empty(0)

    @staticmethod
    def is_available(table: Tensor) -> bool:
        """Whether a table can be ranked here: on a CPU, kernels loaded."""
        return table.device.type == "cpu" and table.dtype in DTYPES and loaded_kernels() is not None

    def rank(self, narrow: Tensor, num_ids: int, num_groups: int | None = None) -> Ranked:
        """Choose the best entries.

        Args:
            narrow: [M, width], finite.
            num_ids: k, at most V.
            num_groups: groups of M / G successive states that share their choice: an entry counts with the
                best that any state of the group gives it, relative to that state's own mass. None: every
                state for itself.
        """
        library = loaded_kernels()
        assert library is not None, "ask is_available first"
        num_rows = len(narrow)
        if (
            not 1 <= num_ids <= self.num_entries
            or narrow.shape[1] != self.width
            or num_rows % (num_groups or 1)
        ):
            raise ShapeError(
                f"{num_ids} of {self.num_entries} entries for states {tuple(narrow.shape)} in "
                f"{num_groups} groups: give [M, {self.width}], M a multiple of the groups, and at most all"
            )
        ids = torch.empty(num_rows if num_groups is None else num_groups, num_ids, dtype=torch.int64)
        log_share = torch.empty(num_rows)
        if not num_rows:
            return Ranked(ids[:0], log_share)
        states = torch.zeros(-(-num_rows // _TILE_ROWS) * _TILE_ROWS, self._stride, dtype=self._dtype)
        states[:num_rows, : self.width] = narrow
        padded = -(-self.num_entries // PAIR) * PAIR
        if self._scores.numel() < num_rows * padded:
            self._scores = torch.empty(num_rows * padded)
        added = None if self._bias is None else self._bias.data_ptr()
        call = abi.RankingCall(
            abi.Linear(self._packed.data_ptr(), added, self.width, self.num_entries),
            DTYPES[self._dtype], torch.get_num_threads(), num_rows, num_groups or num_rows,
            num_groups is not None, num_ids, states.data_ptr(), self._stride, self._scores.data_ptr(),
            ids.data_ptr(), log_share.data_ptr(),
        )  # fmt: skip
        library.paceline_rank(ctypes.byref(call))
        return Ranked(ids, log_share)
