"""Captures forwards as CUDA graphs.

All graphs share one memory pool. That is sound as long as they run one after the other and nobody reads the
results of one after another has run: `targets.static_forward` copies results out right after each replay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from paceline.targets.model_call import ModelStates

NUM_WARM_UPS = 2
"""Runs before a capture: libraries allocate workspaces and choose kernels in the first ones."""


@dataclass(frozen=True, slots=True)
class CudaGraph:
    """A captured forward.

    Attributes:
        states: static results.
        graph: the kernels.
    """

    states: ModelStates
    graph: torch.cuda.CUDAGraph

    def replay(self) -> None:
        """Start all kernels on the current stream."""
        self.graph.replay()


class CudaGraphs:
    """Captures forwards on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def capture(self, run: Callable[[], ModelStates]) -> CudaGraph:
        """Run on a side stream first, as torch asks for, then record one more run without executing it."""
        with torch.cuda.device(self._device):
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            current = torch.cuda.current_stream()
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(NUM_WARM_UPS):
                    run()
            current.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile: a server's, or one that pins memory.
            # On a stream of this device: torch's own for captures stays on the first device that captured.
            with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
                states = run()
        return CudaGraph(states, graph)

    def forget(self) -> None:
        """Wait until no graph is running any more; the next ones get a pool of their own."""
        torch.cuda.synchronize(self._device)
        self._pool = None
