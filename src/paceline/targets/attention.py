"""Attention of a packed forward: masks per layer type, and grouped-query attention without repeated keys.

The mask of a forward is one boolean plane (visible or not), combined before it becomes additive: two additive
planes of `finfo.min` would overflow to -inf, and a row of -inf is NaN after the softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.sequence import Segment
from paceline.targets.architecture import Architecture

PACKED_SDPA = "paceline_packed_sdpa"


def visibility(
    segments: Seq[Segment], starts: Seq[int], num_tokens: int, view_len: int, window: int | None
) -> Tensor:
    """Which cached and new positions each row of the batch may read.

    Args:
        segments: one per batch row.
        starts: cached length of each row.
        num_tokens: rows per segment, padding included (T).
        view_len: positions that attention reads (S).
        window: sliding-window size; None for full attention.

    Returns:
        bool [B, T, S]. Padding rows see position 0 only, so that no row is empty.
    """
    mask = torch.zeros(len(segments), num_tokens, view_len, dtype=torch.bool)
    for row, (segment, start) in enumerate(zip(segments, starts, strict=True)):
        plane = mask[row]
        num_rows, num_prefix = len(segment), len(segment.prefix_ids)
        plane[num_rows:, 0] = True
        plane[:num_rows, :start] = True
        if num_prefix:
            plane[:num_prefix, start : start + num_prefix] = torch.ones(num_prefix, num_prefix).tril().bool()
        if segment.tree is not None:
            root = start + num_prefix
            plane[num_prefix:num_rows, start:root] = True
            plane[num_prefix:num_rows, root : start + num_rows] = segment.tree.ancestors
        if window is not None and start + num_rows > window:
            query_positions = segment_positions(segment, start)
            key_positions = torch.cat([torch.arange(start), query_positions])
            plane[:num_rows, : start + num_rows] &= query_positions[:, None] - key_positions < window
    return mask


def segment_positions(segment: Segment, start: int) -> Tensor:
    """int64 [len(segment)]: absolute position of each row: a tree node's is its root's plus its depth."""
    num_prefix = len(segment.prefix_ids)
    prefix = torch.arange(start, start + num_prefix)
    if segment.tree is None:
        return prefix
    return torch.cat([prefix, segment.tree.depths + (start + num_prefix)])


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, 1, T, S] mask to add to attention scores: 0 where visible, the lowest finite value elsewhere."""
    lowest = torch.finfo(dtype).min
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, lowest)[:, None]


def model_masks(
    visible: Callable[[int | None], Tensor], architecture: Architecture, dtype: torch.dtype, num_tiles: int
) -> object:
    """What the model takes as its mask: one, or one per layer type where full and sliding layers are mixed.

    Args:
        visible: sliding window or None -> bool [B, T, S].
        architecture: of the model.
        dtype: of the weights.
        num_tiles: copies of each mask below each other, for `packed_sdpa`.
    """
    masks = {}
    for layer_type in architecture.layer_types:
        window = architecture.sliding_window if layer_type == "sliding_attention" else None
        mask = additive(visible(window), dtype)
        masks[layer_type] = mask.repeat(1, 1, num_tiles, 1) if num_tiles > 1 else mask
    return masks if len(masks) > 1 else masks.popitem()[1]


def packed_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention with the query heads of a group folded into the query rows (Hugging Face's interface).

    Keys and values are read where they lie in the cache: repeating them for every query head, as the stock
    function does when it is given a mask, copies the whole cache at every layer of every round.

    Args:
        module: the attention layer.
        query: [B, H, T, D].
        key: [B, H_kv, S, D], a view of the cache.
        value: [B, H_kv, S, D], likewise.
        attention_mask: additive [B, 1, G * T, S], tiled G = H / H_kv times by the target.
        dropout: ignored; the target is frozen.
        scaling: factor of the scores.
        kwargs: what the model passes to every attention function.
    """
    batch, num_heads, num_tokens, _ = query.shape
    num_groups = num_heads // key.shape[1]
    folded = query.reshape(batch, key.shape[1], num_groups * num_tokens, query.shape[3])
    num_tiles = attention_mask.shape[2] // num_tokens
    if num_tiles < num_groups:
        attention_mask = attention_mask[:, :, :num_tokens].repeat(1, 1, num_groups, 1)
    elif num_tiles > num_groups:
        # What is cached has fewer heads than what attention reads: DeepSeek's latent attention.
        attention_mask = attention_mask[:, :, : num_groups * num_tokens]
    output = nn.functional.scaled_dot_product_attention(
        folded, key, value, attn_mask=attention_mask, scale=scaling
    )
    output = output.view(batch, num_heads, num_tokens, value.shape[3])
    return output.transpose(1, 2).contiguous(), None


@contextmanager
def packed_attention(model: nn.Module) -> Iterator[None]:
    """Let `model` use `packed_sdpa` inside the block; its own setting is back afterwards."""
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(PACKED_SDPA, packed_sdpa)
    AttentionMaskInterface.register(PACKED_SDPA, sdpa_mask)
    config: Any = model.config
    before = config._attn_implementation
    config._attn_implementation = PACKED_SDPA
    try:
        yield
    finally:
        config._attn_implementation = before
