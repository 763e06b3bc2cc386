"""Weights in the order in which `linear.hpp` reads them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

PAIR = 32
"""Output columns of one pair, and inner steps of one bf16 tile."""


def pack_weight(weight: Tensor) -> Tensor:
    """Pack [out, in] for the kernels; `out`, and for bf16 `in`, are padded with zeros to multiples of 32.

    Returns:
        fp32: [P, in, 32]; bf16: [P, in / 32, 2, 16, 16, 2] (see linear.hpp), P pairs of 16 columns.
    """
    num_out, num_in = weight.shape
    if weight.dtype == torch.float32:
        padded = _padded(weight, 0, -num_out % PAIR)
        return padded.reshape(-1, PAIR, num_in).transpose(1, 2).contiguous()
    padded = _padded(weight, -num_in % PAIR, -num_out % PAIR).contiguous()
    # Two neighbours of the inner dimension stay together: they move as one word.
    words = padded.view(torch.int32).view(padded.shape[0] // PAIR, 2, 16, padded.shape[1] // PAIR, 16)
    packed = words.permute(0, 3, 1, 4, 2).contiguous()
    return packed.view(weight.dtype).view(*packed.shape, 2)


def _padded(weight: Tensor, num_columns: int, num_rows: int) -> Tensor:
    """With zeros to the right and below; `pad` copies even where there is nothing to add."""
    return pad(weight, (0, num_columns, 0, num_rows)) if num_columns or num_rows else weight


def pack_bias(bias: Tensor | None) -> Tensor | None:
    """fp32 [out], padded to whole pairs."""
    return None if bias is None else pad(bias.float(), (0, -bias.shape[0] % PAIR)).contiguous()


def interleave(gate_up: Tensor) -> Tensor:
    """Sixteen rows of the gate and of the other half in turn, so that a pair of columns holds both.

    Args:
        gate_up: [2 I, D] or [2 I], the gate first.

    Returns:
        [2 J, D] or [2 J], J being I rounded up to a multiple of 16.
    """
    gate, up = gate_up.chunk(2)
    sizes = (0, 0) * (gate.dim() - 1) + (0, -gate.shape[0] % 16)
    halves = [pad(part, sizes).view(-1, 16, *part.shape[1:]) for part in (gate, up)]
    return torch.stack(halves, dim=1).flatten(0, 2)
