"""How a training run tells what it does: lines, and a bar with rate and time left for long stages."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OnProgress = Callable[[int], None]
LOG_SECONDS = 30.0


class Reporter:
    """Writes to standard error: a live bar on a terminal, a line now and then elsewhere.

    Args:
        quiet: say nothing (tests).
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet

    def say(self, text: str) -> None:
        """Print a line."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    @contextmanager
    def bar(self, description: str, total: int, unit: str) -> Iterator[OnProgress]:
        """A progress bar; the block calls what it gets with the amount done so far."""
        if self.quiet:
            yield lambda _done: None
        elif sys.stderr.isatty():
            yield from self._live_bar(description, total, unit)
        else:
            yield self._log_lines(description, total, unit)

    def _live_bar(self, description: str, total: int, unit: str) -> Iterator[OnProgress]:
        """A bar that is redrawn in place."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,}/{task.total:,}"),
            TextColumn("{task.fields[rate]:,.0f} " + f"{unit}/s"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task(description, total=total, rate=0.0)
            meter = _Meter()
            yield lambda done: progress.update(task, completed=done, rate=meter.rate(done))

    def _log_lines(self, description: str, total: int, unit: str) -> OnProgress:
        """A line every `LOG_SECONDS`."""
        meter = _Meter()
        last = time.monotonic()

        def report(done: int) -> None:
            nonlocal last
            rate = meter.rate(done)
            if time.monotonic() - last < LOG_SECONDS:
                return
            last = time.monotonic()
            left = f", {(total - done) / rate / 60:.0f} min left" if rate > 0 and total > done else ""
            self.say(f"{description}: {done:,}/{total:,} {unit}, {rate:,.0f}/s{left}")

        return report


class _Meter:
    """Rate since the first report, so that what an earlier run did does not count."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None

    def rate(self, done: int) -> float:
        """Amount per second."""
        now = time.monotonic()
        if self._first is None or done < self._first[1]:
            self._first = (now, done)
        started, before = self._first
        return (done - before) / (now - started) if now > started else 0.0
