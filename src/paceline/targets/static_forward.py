"""Decoding rounds on fixed shapes: the model's own forward, captured once per shape and then replayed.

Between two matrix products of a small model a GPU waits for Python. A captured forward has no Python in it:
the host writes one vector of numbers into a buffer and starts all kernels with one call. What is captured is
the whole way from that vector to the final hidden state: the trees' ancestors, positions, masks, cache writes
and the layers (`targets.tree_rows`, `targets.model_call`).

Not captured, on purpose: prompts, whose lengths differ too much; and the output layer, a single product that
is better asked for the rows that are nodes than for all rows of the padded batch.

Row b of the batch is cache slot b, so any set of sequences is one forward; slots without a tree are padding.
How a forward is captured is given from outside: `targets.cuda_graphs` on a GPU, stand-ins in tests.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.errors import UnsupportedFeatureError
from paceline.kv_cache import KVCache
from paceline.sequence import Segment
from paceline.targets.architecture import Architecture
from paceline.targets.attention import model_masks
from paceline.targets.buckets import MAX_WIDTH, Bucket
from paceline.targets.model_call import ModelCall, ModelStates
from paceline.targets.staged_rows import StagedRows, stage
from paceline.targets.tree_rows import TreeRows
from paceline.transfers import upload_into

MAX_GRAPHS = 128
"""Captured forwards that are kept; one more, and all are dropped, which rarely happens to a running batch."""


class CaptureError(UnsupportedFeatureError):
    """A model's forward cannot be captured; says why."""


class CapturedForward(Protocol):
    """A forward that can be done again on the same buffers."""

    @property
    def states(self) -> ModelStates:
        """Where results are after a replay; the next replay of any captured forward may overwrite them."""

    def replay(self) -> None:
        """Do it again."""


class GraphCapture(Protocol):
    """Captures forwards."""

    def capture(self, run: Callable[[], ModelStates]) -> CapturedForward:
        """Capture what `run` does; it may be called several times first, and need not have run afterwards."""

    def forget(self) -> None:
        """All captured forwards are no longer used."""


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured forward with the rows that it reads."""

    inputs: StagedRows
    forward: CapturedForward


class StaticDecoder:
    """Runs decoding rounds of one model.

    Args:
        call: the model.
        architecture: its parts.
        cache: where keys and values are; its tail takes `MAX_WIDTH` rows.
        num_tiles: how often the mask is repeated for packed attention.
        dtype: of the mask.
        device: of the model.
        graphs: captures forwards.
    """

    def __init__(
        self,
        call: ModelCall,
        architecture: Architecture,
        cache: KVCache,
        *,
        num_tiles: int,
        dtype: torch.dtype,
        device: torch.device,
        graphs: GraphCapture,
    ) -> None:
        self._call = call
        self._architecture = architecture
        self._cache = cache
        self._num_tiles = num_tiles
        self._dtype, self._device = dtype, device
        self._capture = graphs
        self._graphs: dict[tuple[Bucket, tuple[int, ...]], _Graph] = {}
        self._generation = cache.generation

    @property
    def num_graphs(self) -> int:
        """Forwards that are captured now."""
        return len(self._graphs)

    @staticmethod
    def takes(segments: Seq[Segment]) -> bool:
        """Whether the segments are trees alone, none wider than the widest bucket."""
        return all(
            segment.tree is not None and not segment.prefix_ids and len(segment) <= MAX_WIDTH
            for segment in segments
        )

    def forward(
        self, segments: Seq[Segment], slots: Seq[int], starts: Seq[int], features: Seq[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Score trees and write their keys and values at `starts` of their `slots`.

        Args:
            segments: one per sequence, as `takes` wants them.
            slots: cache slot of each.
            starts: cached tokens of each.
            features: layers whose inputs are wanted.

        Returns:
            Hidden states [N, D] after the final norm, and layer -> [N, D], in the order of the segments. They
            are copies: nothing here overwrites them later.

        Raises:
            CaptureError: this model cannot be captured.
        """
        bucket = Bucket.of(segments, slots, starts)
        self._cache.reserve(bucket.batch_size, bucket.view_len)
        key = (bucket, tuple(features))
        is_full = len(self._graphs) >= MAX_GRAPHS and key not in self._graphs
        if is_full or self._cache.generation != self._generation:
            self._forget()
        graph = self._graphs.get(key)
        if graph is None:
            # Captured with rows that stand for nothing, which write where no text is.
            inputs = StagedRows.empty(bucket, self._device)
            graph = self._graphs[key] = _Graph(inputs, self._captured(inputs, bucket, features))
        upload_into(graph.inputs.vector, stage(segments, slots, starts, bucket).vector)
        graph.forward.replay()
        order = graph.inputs.order[: sum(map(len, segments))]
        states = graph.forward.states
        return _rows(states.hidden, order), {
            layer: _rows(states.features[layer], order) for layer in features
        }

    def _captured(self, inputs: StagedRows, bucket: Bucket, features: Seq[int]) -> CapturedForward:
        """Capture the forward of a bucket."""

        def run() -> ModelStates:
            rows = TreeRows(inputs, self._cache.tail)
            self._cache.open_static_window(rows.writes, bucket.view_len)
            masks = model_masks(
                lambda window: rows.visibility(bucket.view_len, window),
                self._architecture,
                self._dtype,
                self._num_tiles,
            )
            return self._call(inputs.token_ids, rows.positions, masks, self._cache, features)

        try:
            return self._capture.capture(run)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise CaptureError(
                f"the forward of {type(self._architecture.base_model).__name__} cannot be captured "
                f"({type(error).__name__}: {error})"
            ) from error

    def _forget(self) -> None:
        """Drop all captured forwards."""
        self._graphs.clear()
        self._capture.forget()
        self._generation = self._cache.generation


def _rows(states: Tensor, order: Tensor) -> Tensor:
    """[B, W, D] of a static buffer -> a new [N, D] without padding."""
    return states.flatten(0, 1).index_select(0, order)
