"""What a forward of so many rows costs on this machine: measured once, kept in the cache folder.

The table holds seconds of a forward with its logits and their argmax, for widths up to a few hundred rows, at
a few hundred cached tokens. Only ratios between widths matter to the node budget, so a machine that is busy
for a while does not mislead it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from paceline.config import default_cache_dir, dtype_name
from paceline.errors import ConfigError
from paceline.kernels.build import processor
from paceline.sampling import SamplingParameters
from paceline.sequence import Segment, Sequence
from paceline.targets.base import TargetModel
from paceline.tree import DraftTree

WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 65, 96, 129)
CACHED_TOKENS = 192
TIME_LIMIT = 2.0
"""Seconds after which no further repetition is measured."""
MAX_REPETITIONS = 5
FORMAT = 1


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """A table of costs.

    Attributes:
        widths: rows, ascending, the first one 1.
        measured: seconds of a forward of that width.
    """

    widths: tuple[int, ...]
    measured: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuse tables that cannot be read off."""
        ascending = all(a < b for a, b in zip(self.widths, self.widths[1:], strict=False))
        if len(self.widths) != len(self.measured) or len(self.widths) < 2 or not ascending:
            raise ConfigError(f"forward costs: widths {self.widths} with {len(self.measured)} times")
        if self.widths[0] != 1 or min(self.measured) <= 0:
            raise ConfigError(f"forward costs start at width 1 and are positive, not {self.measured}")

    def seconds(self, rows: Tensor) -> Tensor:
        """Seconds of forwards of the given rows: int64 [N] -> float64 [N].

        Linear between measured widths, and beyond the last one; never falling with width, since a wide
        forward that was measured to be cheaper than a narrow one is noise.
        """
        widths = torch.tensor(self.widths, dtype=torch.float64)
        costs = torch.tensor(self.measured, dtype=torch.float64).cummax(0).values
        at = rows.double()
        right = torch.searchsorted(widths, at).clamp(1, len(widths) - 1)
        left = right - 1
        slope = (costs[right] - costs[left]) / (widths[right] - widths[left])
        return costs[left] + slope * (at - widths[left])


def measured_cost(
    target: TargetModel, *, folder: Path | None = None, progress: Callable[[str], None] | None = None
) -> ForwardCost:
    """The table of this machine and target, from the cache or measured now.

    Args:
        target: whose forwards.
        folder: where tables are kept; by default in the cache folder.
        progress: told in one line before measuring.
    """
    path = (folder or default_cache_dir() / "forward-costs") / f"{_key(target)}.json"
    try:
        content = json.loads(path.read_text())
        if content["format"] == FORMAT:
            return ForwardCost(tuple(content["widths"]), tuple(content["seconds"]))
    except (OSError, ValueError, KeyError, TypeError, ConfigError):
        pass
    if progress is not None:
        progress("measuring what forwards of different widths cost here, once")
    cost = measure(target)
    _write(path, {"format": FORMAT, "widths": cost.widths, "seconds": cost.measured})
    return cost


def measure(target: TargetModel, clock: Callable[[], float] = perf_counter) -> ForwardCost:
    """Time forwards of `WIDTHS` rows, widths in turn, and take each one's fastest: the rest is other load."""
    room = target.context_len - CACHED_TOKENS
    widths = [width for width in WIDTHS if width <= max(room, 2)]
    ids = [(7 * i) % target.vocab_size for i in range(min(CACHED_TOKENS, target.context_len // 2))]
    sequence = Sequence(ids, SamplingParameters(), frozenset(), target.context_len, seed=0)
    fastest = dict.fromkeys(widths, float("inf"))
    try:
        target.forward([Segment(sequence, tuple(ids[:-1]), None)])
        started = clock()
        for repetition in range(MAX_REPETITIONS):
            for width in widths:
                segment = Segment(sequence, (), _bush(ids[-1], width, target.vocab_size))
                begun = clock()
                target.forward([segment]).tree_logits().float().argmax(-1).tolist()
                fastest[width] = min(fastest[width], clock() - begun)
            if repetition and clock() - started > TIME_LIMIT:
                break
    finally:
        target.release(sequence)
    return ForwardCost(tuple(widths), tuple(fastest[width] for width in widths))


def _bush(root_token_id: int, width: int, vocab_size: int) -> DraftTree:
    """A tree of `width` rows in chains of four, the usual depth of drafted phrases."""
    nodes = torch.arange(1, width)
    parents = torch.where((nodes - 1) % 4 == 0, 0, nodes - 1)
    tokens = torch.cat([torch.tensor([root_token_id]), (nodes * 13) % vocab_size])
    return DraftTree(tokens, torch.cat([torch.tensor([-1]), parents]), torch.ones(width))


def _key(target: TargetModel) -> str:
    """What the costs depend on."""
    parts = (
        target.fingerprint,
        dtype_name(target.dtype),
        str(target.device),
        getattr(target, "execution", ""),
        torch.get_num_threads(),
        processor(),
        torch.__version__,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _write(path: Path, content: dict[str, object]) -> None:
    """Write whole or not at all; a folder that cannot be written costs a measurement at the next start."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(content))
        os.replace(partial, path)
    except OSError:
        return
