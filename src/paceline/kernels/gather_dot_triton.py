"""The gather-dot of `gather_dot.py` for GPUs, in Triton.

Tested through Triton's interpreter; no GPU has run it yet.

One program takes a block of ids of one row of states. Each weight row is read once, in blocks of columns, and
goes from memory into registers: nothing is gathered into a buffer first.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_CONFIGS = [
    triton.Config({"BLOCK_IDS": ids, "BLOCK_COLUMNS": columns}, num_warps=warps)
    for ids, columns, warps in (
        (16, 128, 4), (16, 256, 4), (32, 128, 4), (32, 256, 8), (64, 64, 4), (64, 128, 8), (8, 512, 4),
    )
]  # fmt: skip


def _kernel(
    hidden: Any, weight: Any, index: Any, bias: Any, out: Any,
    num_ids: Any, size: Any, weight_stride: Any, index_stride: Any, ids_bucket: Any,  # noqa: ARG001
    HAS_BIAS: tl.constexpr, BLOCK_IDS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """Scores of one block of ids; see `gather_dot_triton`."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK_IDS + tl.arange(0, BLOCK_IDS)
    is_id = places < num_ids
    ids = tl.load(index + row * index_stride + places, mask=is_id, other=0)
    scores = tl.zeros([BLOCK_IDS], dtype=tl.float32)
    for start in range(0, size, BLOCK_COLUMNS):
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        is_column = columns < size
        state = tl.load(hidden + row * size + columns, mask=is_column, other=0.0).to(tl.float32)
        rows = tl.load(
            weight + ids[:, None] * weight_stride + columns[None, :],
            mask=is_id[:, None] & is_column[None, :],
            other=0.0,
        )
        scores += tl.sum(rows.to(tl.float32) * state[None, :], axis=1)
    if HAS_BIAS:
        scores += tl.load(bias + ids, mask=is_id, other=0.0).to(tl.float32)
    tl.store(out + row * num_ids + places, scores, mask=is_id)


_compiled: Any = triton.jit(_kernel)
if not _IS_INTERPRETED:
    _compiled = triton.autotune(_CONFIGS, key=["size", "ids_bucket"])(_compiled)


def gather_dot_triton(hidden: Tensor, weight: Tensor, index: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `gather_dot`: [M, D], [V, D], int64 [M, k] or [k], [V] -> fp32 [M, k]."""
    num_rows, num_ids = hidden.shape[0], index.shape[-1]
    states, index = hidden.contiguous(), index.contiguous()
    rows = weight if weight.stride(1) == 1 else weight.contiguous()
    scores = torch.empty(num_rows, num_ids, dtype=torch.float32, device=hidden.device)

    def grid(blocks: dict[str, int]) -> tuple[int, int]:
        return num_rows, triton.cdiv(num_ids, blocks["BLOCK_IDS"])

    chosen = dict(_CONFIGS[0].kwargs) if _IS_INTERPRETED else {}
    _compiled[grid](
        states, rows, index, states if bias is None else bias.contiguous(), scores,
        num_ids, hidden.shape[1], rows.stride(0), 0 if index.dim() == 1 else num_ids,
        # Tuned per power of two: every k of its own would be tuned anew.
        triton.next_power_of_2(num_ids),
        HAS_BIAS=bias is not None,
        **chosen,
    )  # fmt: skip
    return scores
