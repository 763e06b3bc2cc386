"""One request on its way through the engine: its choices, and the line back to whoever waits for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from paceline.engine.generator import Answer, StreamEvent
from paceline.server.errors import ApiError
from paceline.server.requests import Work


@dataclass(frozen=True, slots=True)
class ChoiceEvent:
    """What a round added to one choice."""

    choice: int
    event: StreamEvent


@dataclass(frozen=True, slots=True)
class FirstRound:
    """When a choice began to speak: `time.monotonic()`, and how many tokens came at once."""

    time: float
    num_tokens: int


@dataclass(eq=False, slots=True)
class Job:
    """A request in the scheduler.

    The engine's thread puts events in, the event loop takes them out; nothing else is shared.

    Attributes:
        work: what is asked.
        loop: where the events are waited for.
        arrived: `time.monotonic()` of its arrival.
        events: for the reader: None once the engine has taken the request in; an error is the last of them.
        answers: of the choices that the engine works on, by number; the engine's thread alone reads it.
        is_cancelled: set by the reader when nobody waits any more.
        num_open: choices that are not finished.
        first_token: `time.monotonic()` of the first event.
        first_rounds: of each choice: when its first round ended, and how many tokens that brought.
    """

    work: Work
    loop: asyncio.AbstractEventLoop
    arrived: float = field(default_factory=time.monotonic)
    events: asyncio.Queue[ChoiceEvent | ApiError | None] = field(default_factory=asyncio.Queue)
    answers: dict[int, Answer] = field(default_factory=dict)
    is_cancelled: bool = False
    num_open: int = 0
    first_token: float | None = None
    first_rounds: dict[int, FirstRound] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """All choices are open."""
        self.num_open = len(self.work.questions)

    @property
    def deadline(self) -> float | None:
        """`time.monotonic()` at which it is given up."""
        limit = self.work.deadline_seconds
        return None if limit is None else self.arrived + limit

    def deliver(self, item: ChoiceEvent | ApiError | None) -> None:
        """Hand something to the reader; called by the engine's thread."""
        try:
            self.loop.call_soon_threadsafe(self.events.put_nowait, item)
        except RuntimeError:
            # The loop is closed: the server ends, and nobody reads any more.
            self.is_cancelled = True

    async def admitted(self) -> None:
        """Wait until the engine has taken the request in, which it does between two forwards.

        Raises:
            ApiError: it refuses the request.
        """
        item = await self.events.get()
        if isinstance(item, ApiError):
            raise item

    async def read(self) -> AsyncIterator[ChoiceEvent]:
        """Events until every choice is finished.

        Raises:
            ApiError: the request was given up.
        """
        open_choices = len(self.work.questions)
        while open_choices:
            item = await self.events.get()
            if isinstance(item, ApiError):
                raise item
            if item is None:
                continue
            open_choices -= item.event.result is not None
            yield item
