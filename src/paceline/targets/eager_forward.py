"""The model's own forward over a batch of segments: padded rows, masks and positions built on the host.

The reference of all other ways of execution, and what runs where none of them does.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from paceline.kv_cache import KVCache
from paceline.sequence import Segment
from paceline.targets import attention
from paceline.targets.architecture import Architecture
from paceline.targets.model_call import ModelCall, ModelStates


class EagerDecoder:
    """Runs the decoder on segments of any kind.

    Args:
        model_call: calls the decoder.
        architecture: of the model.
        kv_cache: where keys and values go.
        num_tiles: copies of each mask below each other, for `attention.packed_sdpa`.
        dtype: of the weights.
        device: of the weights.
    """

    def __init__(
        self,
        model_call: ModelCall,
        architecture: Architecture,
        kv_cache: KVCache,
        *,
        num_tiles: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_tiles = num_tiles
        self._call = model_call
        self._architecture = architecture
        self._cache = kv_cache
        self._dtype = dtype
        self._device = device

    def forward(
        self, segments: Seq[Segment], slots: Seq[int], starts: Seq[int], features: Seq[int] = ()
    ) -> ModelStates:
        """Score the segments and write their keys and values behind the cached ones.

        One forward serves all of them when their slots are consecutive; others take one per run of slots.

        Args:
            segments: at most one per sequence.
            slots: cache slot of each.
            starts: cached tokens of each.
            features: layers whose inputs are wanted.

        Returns:
            hidden [N, D] and features, rows in the order of the segments, no padding among them.
        """
        order = sorted(range(len(segments)), key=slots.__getitem__)
        runs = list(_runs(order, slots))
        parts = [
            self._forward_run([segments[i] for i in run], slots[run[0]], [starts[i] for i in run], features)
            for run in runs
        ]
        if len(parts) == 1 and order == list(range(len(segments))):
            return parts[0]
        return self._reordered([len(segment) for segment in segments], order, parts)

    def _forward_run(
        self, run: list[Segment], first_slot: int, starts: list[int], features: Seq[int]
    ) -> ModelStates:
        """One forward over sequences in consecutive slots."""
        num_tokens = max(map(len, run))
        self._cache.reserve(first_slot + len(run), max(starts) + num_tokens)
        view_len = self._cache.open_window(first_slot, starts, num_tokens)
        token_ids = torch.zeros(len(run), num_tokens, dtype=torch.int64)
        positions = torch.zeros(len(run), num_tokens, dtype=torch.int64)
        for row, (segment, start) in enumerate(zip(run, starts, strict=True)):
            ids = torch.tensor(segment.prefix_ids, dtype=torch.int64)
            if segment.tree is not None:
                ids = torch.cat([ids, segment.tree.token_ids])
            token_ids[row, : len(segment)] = ids
            positions[row, : len(segment)] = attention.segment_positions(segment, start)
        states = self._call(
            token_ids.to(self._device),
            positions.to(self._device),
            self._masks(run, starts, num_tokens, view_len),
            self._cache,
            features,
        )
        return ModelStates(
            _flatten(run, states.hidden),
            {layer: _flatten(run, layer_input) for layer, layer_input in states.features.items()},
        )

    def _masks(self, run: list[Segment], starts: list[int], num_tokens: int, view_len: int) -> object:
        """Additive masks of the run."""

        def visible(window: int | None) -> Tensor:
            return attention.visibility(run, starts, num_tokens, view_len, window).to(self._device)

        return attention.model_masks(visible, self._architecture, self._dtype, self.num_tiles)

    def _reordered(self, lengths: list[int], order: list[int], parts: list[ModelStates]) -> ModelStates:
        """Join several runs, rows in the order of the segments."""
        ends = torch.tensor([lengths[i] for i in order]).cumsum(0).tolist()
        starts = {index: end - lengths[index] for index, end in zip(order, ends, strict=True)}
        rows = torch.cat([torch.arange(starts[i], starts[i] + length) for i, length in enumerate(lengths)])
        rows = rows.to(self._device)
        return ModelStates(
            torch.cat([part.hidden for part in parts])[rows],
            {layer: torch.cat([part.features[layer] for part in parts])[rows] for layer in parts[0].features},
        )


def _runs(order: list[int], slots: Seq[int]) -> Iterator[list[int]]:
    """Split indices, sorted by slot, where their slots are not consecutive."""
    run: list[int] = []
    for index in order:
        if run and slots[index] != slots[run[-1]] + 1:
            yield run
            run = []
        run.append(index)
    yield run


def _flatten(run: list[Segment], states: Tensor) -> Tensor:
    """[B, T, D] with padding -> [N, D] without."""
    if len(run) == 1:
        return states[0, : len(run[0])]
    if all(len(segment) == states.shape[1] for segment in run):
        return states.reshape(-1, states.shape[2])
    return torch.cat([states[row, : len(segment)] for row, segment in enumerate(run)])
