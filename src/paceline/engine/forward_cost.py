"""What a forward of so many rows costs on this machine: measured once, kept in the cache folder.

The table holds seconds of a forward with its logits and their argmax, for widths up to a few hundred rows, at
few and at many cached tokens. Only ratios between widths matter to the node budget, so a machine that is busy
for a while does not mislead it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from paceline.config import default_cache_dir, dtype_name
from paceline.errors import ConfigError
from paceline.kernels.build import processor
from paceline.kernels.selection import argmax_rows
from paceline.sampling import SamplingParameters
from paceline.sequence import Segment, Sequence
from paceline.targets.base import TargetModel
from paceline.tree import DraftTree

WIDTHS = (1, 2, 4, 8, 12, 16, 17, 24, 32, 33, 48, 49, 65, 96, 129)
"""Those at which forwards are measured. Matrix units take sixteen rows at a time, so costs leap behind
multiples of that; graphs are captured for some of these widths (`targets.buckets`)."""
CACHED_LENS = (128, 1024)
"""Cached tokens at which forwards are measured; the second only where filling the cache takes little."""
TIME_LIMIT = 1.5
"""Seconds after which no wider forward and no further repetition is measured, for each cached length."""
MAX_REPETITIONS = 5
PREFILL_ROWS = 256
BUSY_LOAD = 0.8
"""Load per core above which measured times are not kept."""
FORMAT = 3


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """Tables of costs.

    Attributes:
        widths: rows, ascending, the first one 1.
        measured: seconds of a forward of that width, with few tokens cached.
        cached_len: how many.
        long_measured: the same with many; None where that was not measured, and length costs nothing then.
        long_cached_len: how many.
    """

    widths: tuple[int, ...]
    measured: tuple[float, ...]
    cached_len: int = 0
    long_measured: tuple[float, ...] | None = None
    long_cached_len: int = 0

    def __post_init__(self) -> None:
        """Refuse tables that cannot be read off."""
        ascending = all(a < b for a, b in zip(self.widths, self.widths[1:], strict=False))
        for measured in (self.measured, self.long_measured):
            if measured is None:
                continue
            if len(self.widths) != len(measured) or len(self.widths) < 2 or not ascending:
                raise ConfigError(f"forward costs: widths {self.widths} with {len(measured)} times")
            if self.widths[0] != 1 or min(measured) <= 0:
                raise ConfigError(f"forward costs start at width 1 and are positive, not {measured}")
        if self.long_measured is not None and self.long_cached_len <= self.cached_len:
            raise ConfigError(f"forward costs at {self.cached_len} and at {self.long_cached_len} tokens")

    def seconds(self, rows: Tensor, cached_len: float = 0.0) -> Tensor:
        """Seconds of forwards of the given rows: int64 [N] -> float64 [N].

        Linear between measured widths, beyond the last one, and in the cached length; never falling with
        either, since a forward that was measured to be cheaper than a lesser one is noise.
        """
        few = self._read(self.measured, rows)
        if self.long_measured is None:
            return few
        many = torch.maximum(self._read(self.long_measured, rows), few)
        share = max(0.0, (cached_len - self.cached_len) / (self.long_cached_len - self.cached_len))
        return few + share * (many - few)

    def _read(self, measured: tuple[float, ...], rows: Tensor) -> Tensor:
        """Read one table at the given rows."""
        widths = torch.tensor(self.widths, dtype=torch.float64)
        # Other load only ever adds time, so a wider forward's time bounds that of every narrower one.
        costs = torch.tensor(measured, dtype=torch.float64).flip(0).cummin(0).values.flip(0)
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
    # Without a fingerprint nobody could tell one model's table from another's.
    is_kept = bool(target.fingerprint)
    try:
        content = json.loads(path.read_text()) if is_kept else {"format": None}
        if content.pop("format") == FORMAT:
            return ForwardCost(**{name: _as_tuple(value) for name, value in content.items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError):
        pass
    if progress is not None:
        kept = ": not kept, since this machine is busy" if is_busy() else ", once"
        progress(f"measuring what forwards of different widths cost here{kept}")
    cost = measure(target)
    # Times of a busy machine would mislead every later start; this one corrects itself by what is accepted.
    if is_kept and not is_busy():
        _write(path, {"format": FORMAT, **asdict(cost)})
    return cost


def measure(target: TargetModel, clock: Callable[[], float] = perf_counter) -> ForwardCost:
    """Time forwards of `WIDTHS` rows with few and with many cached tokens."""
    few = min(CACHED_LENS[0], target.context_len // 2)
    widths = [width for width in WIDTHS if width <= max(target.context_len - few, 2)]
    fastest = _fastest(target, few, widths, clock)
    widths = list(fastest)
    short = ForwardCost(tuple(widths), tuple(fastest.values()), few)
    many = min(CACHED_LENS[1], target.context_len - widths[-1])
    filling = many / widths[-1] * short.measured[-1]
    if many < 2 * few or filling > TIME_LIMIT:
        return short
    slow = _fastest(target, many, widths, clock)
    if len(slow) < len(widths):
        return short
    return replace(short, long_measured=tuple(slow.values()), long_cached_len=many)


def _fastest(
    target: TargetModel, cached_len: int, widths: list[int], clock: Callable[[], float]
) -> dict[int, float]:
    """Width -> seconds of its fastest forward (the rest is other load); widths take turns.

    At least two widths are measured, and wider ones as long as the time allows.
    """
    ids = [(7 * i) % target.vocab_size for i in range(cached_len + 1)]
    sequence = Sequence(ids, SamplingParameters(), frozenset(), target.context_len + 1, seed=0)
    fastest: dict[int, float] = {}
    try:
        for start in range(0, cached_len, PREFILL_ROWS):
            target.forward(
                [Segment(sequence, tuple(ids[start : min(start + PREFILL_ROWS, cached_len)]), None)]
            )
        warms_up = target.device.type != "cpu"
        started, warming = clock(), 0.0
        for _ in range(MAX_REPETITIONS):
            for width in list(fastest) or widths:
                if len(fastest) >= 2 and clock() - started - warming > TIME_LIMIT:
                    return fastest
                segment = Segment(sequence, (), _bush(ids[-1], width, target.vocab_size))
                if warms_up and width not in fastest:
                    # A device chooses kernels and captures in the first forward of a shape.
                    warming += _forward_seconds(target, segment, clock)
                taken = _forward_seconds(target, segment, clock)
                fastest[width] = min(fastest.get(width, taken), taken)
    finally:
        target.release(sequence)
    return fastest


def _forward_seconds(target: TargetModel, segment: Segment, clock: Callable[[], float]) -> float:
    """Time of one forward with its logits and their argmax on the host."""
    begun = clock()
    argmax_rows(target.forward([segment]).tree_logits()).tolist()
    return clock() - begun


def is_busy() -> bool:
    """Whether other processes keep most of the cores at work."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return load > BUSY_LOAD * (os.cpu_count() or 1)


def _as_tuple(value: object) -> Any:
    """JSON has lists only."""
    return tuple(value) if isinstance(value, list) else value


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
