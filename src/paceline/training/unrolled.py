"""EAGLE-3's training-time test: a head is trained on what it will read when it drafts.

arXiv 2503.01840. In the first step every position reads the target's features, as committed tokens do. In
step i it reads the state that step i - 1 made one position earlier, as the i-th drafted token behind a
committed text does, and attends to what that token would see: features up to i positions back, and from there
on its own states of the steps between. All positions do this at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.heads.eagle import EagleHead, EagleStates

DEFAULT_STEPS = 7
STEP_DECAY = 0.8
"""Step i counts 0.8^i, as published for SpecVocab's heads."""


def unroll(
    head: EagleHead,
    embedding: Tensor,
    features: Tensor,
    num_steps: int,
    lengths: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Iterator[EagleStates]:
    """States of successive steps; step i means something from position i on.

    Position t of step i stands for the i-th token that is drafted behind pair t - i.

    Args:
        head: to train.
        embedding: [B, T, D], of the token behind each position.
        features: [B, T, F, target_hidden_size], of the target at each position.
        num_steps: steps, the first one included.
        lengths: int64 [B], positions of each text; those behind are padding. None: all T.
        dtype: of the products (mixed precision: weights, residual and norms keep theirs); None: of the head.

    Yields:
        States [B, T, D] of one step after the other.
    """
    num_texts, width = embedding.shape[:2]
    device = embedding.device
    positions = torch.arange(width, device=device).expand(num_texts, width)
    real = torch.ones(num_texts, width, dtype=torch.bool, device=device)
    if lengths is not None:
        real = positions < lengths[:, None]
    attention = _UnrolledAttention(real)
    mixed = torch.autocast(device.type, dtype, enabled=dtype not in (None, head.dtype))
    with mixed:
        state = head.fuse(features)
    for step in range(num_steps):
        # Left before the step is handed out: what the caller does with it is in the caller's precision.
        with mixed:
            found = head(embedding, state, positions, attention.at_step(step))
        yield found
        # Position t goes on from what position t - 1 has just made.
        state = torch.cat([found.fed_back[:, :1] * 0, found.fed_back[:, :-1]], dim=1)


class _UnrolledAttention:
    """Keys and values of all steps so far.

    Args:
        real: bool [B, T], which positions are no padding.
    """

    def __init__(self, real: Tensor) -> None:
        self._real = real
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def at_step(self, step: int) -> _StepAttention:
        """The attention of one step, to be called once."""
        return _StepAttention(self, step)

    def attend(self, step: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Queries [B, H, T, d], keys and values [B, K, T, d] of this step -> [B, H, T, d]."""
        groups = queries.shape[1] // keys.shape[1]
        self._keys.append(keys.repeat_interleave(groups, dim=1))
        self._values.append(values.repeat_interleave(groups, dim=1))
        width, scale = queries.shape[2], queries.shape[3] ** -0.5
        # Features up to `step` positions back; padding is seen by nobody.
        rows = torch.arange(width, device=queries.device)
        visible = (rows[None, :] <= rows[:, None] - step)[None] & self._real[:, None, :]
        scores = (queries @ self._keys[0].transpose(2, 3) * scale).float()
        parts = [scores.masked_fill(~visible[:, None], -torch.inf)]
        # Of each later step the one place that lies on this draft: step j of position t - (step - j).
        own = [_shifted(self._keys[j], step - j) for j in range(1, step + 1)]
        parts += [((queries * key).sum(-1, keepdim=True) * scale).float() for key in own]
        weights = torch.softmax(torch.cat(parts, dim=-1), dim=-1).nan_to_num(0.0).to(queries.dtype)
        out = weights[..., :width] @ self._values[0]
        for j in range(1, step + 1):
            out = out + weights[..., width + j - 1, None] * _shifted(self._values[j], step - j)
        return out


class _StepAttention:
    """`attend` of one step in the form that a head calls."""

    def __init__(self, attention: _UnrolledAttention, step: int) -> None:
        self._attention = attention
        self._step = step

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See `_UnrolledAttention.attend`."""
        return self._attention.attend(self._step, queries, keys, values)


def _shifted(vectors: Tensor, places: int) -> Tensor:
    """[B, H, T, d] moved so many positions further; what comes in from the front is never looked at."""
    return vectors if places == 0 else torch.roll(vectors, places, dims=2)
