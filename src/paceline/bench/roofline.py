"""How close a round comes to the floor that memory sets.

Decoding one sequence reads every weight once per forward, and the cached keys and values of every layer. On
most machines that takes longer than the arithmetic, so `bytes / bandwidth` is the least time that a round can
take; what is above it is waiting, arithmetic of wide trees, and overhead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch

from paceline.bench.arms import ArmName
from paceline.bench.records import GroupRecord

BUFFER_BYTES = 1 << 29
REPETITIONS = 7


@dataclass(frozen=True, slots=True)
class RooflineRow:
    """One arm on one suite.

    Attributes:
        suite: name of the suite.
        arm: name of the arm.
        batch_size: prompts decoded at once.
        bytes_per_round: weights and cached keys and values that a forward reads.
        floor_ms: what reading them takes.
        forward_ms: what the target's forwards took per round, prompts included.
        share: floor over forward.
    """

    suite: str
    arm: str
    batch_size: int
    bytes_per_round: float
    floor_ms: float
    forward_ms: float
    share: float


@dataclass(frozen=True, slots=True)
class Roofline:
    """The floor of all arms.

    Attributes:
        bandwidth: bytes that this machine reads per second, measured.
        weight_bytes: read by every forward.
        cache_bytes_per_token: read for every cached token.
        rows: per suite and arm.
    """

    bandwidth: float
    weight_bytes: int
    cache_bytes_per_token: int
    rows: tuple[RooflineRow, ...]

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def measured_bandwidth(clock: Callable[[], float] = perf_counter) -> float:
    """Bytes per second of summing a buffer that no cache holds; the fastest of several."""
    buffer = torch.ones(BUFFER_BYTES // 8, dtype=torch.int64)
    fastest = float("inf")
    for _ in range(REPETITIONS):
        started = clock()
        buffer.sum()
        fastest = min(fastest, clock() - started)
    return BUFFER_BYTES / fastest


def roofline(
    records: Iterable[GroupRecord], arms: Seq[ArmName], target: Any, bandwidth: float | None = None
) -> Roofline:
    """Hold the recorded forwards against the floor.

    Args:
        records: of a run.
        arms: of that run; baselines have no rounds and are left out.
        target: with `num_read_bytes` and `num_cache_bytes_per_token`.
        bandwidth: bytes per second; measured when None.
    """
    bandwidth = measured_bandwidth() if bandwidth is None else bandwidth
    rows = []
    by_arm: dict[tuple[str, int, str], list[GroupRecord]] = {}
    for record in records:
        by_arm.setdefault((record.key.suite, record.key.batch_size, record.key.arm), []).append(record)
    for (suite, batch_size, arm), own in by_arm.items():
        if arm not in map(str, arms):
            continue
        counted = [(t, t.statistics) for record in own for t in record.turns if t.statistics is not None]
        num_rounds = sum(statistics.num_rounds for _, statistics in counted)
        if not num_rounds:
            continue
        # Every sequence of a batch counts the forwards that it shares.
        cached = sum(
            (len(turn.prompt_ids) + statistics.num_output_tokens / 2) * statistics.num_rounds
            for turn, statistics in counted
        )
        tokens = cached / num_rounds * batch_size
        num_bytes = target.num_read_bytes + tokens * target.num_cache_bytes_per_token
        forward = sum(statistics.forward_seconds for _, statistics in counted) / num_rounds
        floor = num_bytes / bandwidth
        rows.append(
            RooflineRow(suite, arm, batch_size, num_bytes, floor * 1e3, forward * 1e3, floor / forward)
        )
    return Roofline(bandwidth, target.num_read_bytes, target.num_cache_bytes_per_token, tuple(rows))
