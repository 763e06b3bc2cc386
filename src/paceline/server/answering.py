"""From a job's events to a body or a stream, for both endpoints."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from paceline.engine.generator import GenerationResult, StreamEvent
from paceline.sequence import TokenLogProb
from paceline.server.errors import ApiError
from paceline.server.jobs import Job
from paceline.server.responses import ChatWording, Envelope, Json, usage_of
from paceline.server.token_text import TokenTexts
from paceline.server.tool_calls import Call, ToolCallReader
from paceline.server.trace import round_trace

DONE = "[DONE]"


@dataclass(slots=True)
class _Choice:
    """What one choice has come to so far."""

    reader: ToolCallReader | None
    text: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    num_rounds: int = 0
    num_chars: int = 0
    result: GenerationResult | None = None


class Answering:
    """Turns the events of one request into what its client gets.

    Args:
        job: the request in the scheduler.
        envelope: what all parts of the answer share.
        texts: of single tokens.
        drafter: name of the one that is used.
        num_prompts: different prompts of the request.
    """

    def __init__(
        self, job: Job, envelope: Envelope, texts: TokenTexts, drafter: str, num_prompts: int
    ) -> None:
        self.job = job
        self._envelope, self._texts = envelope, texts
        self._drafter, self._num_prompts = drafter, num_prompts
        style = job.work.tool_format
        self._choices = [
            _Choice(None if style is None else ToolCallReader(style)) for _ in job.work.questions
        ]

    async def body(self) -> Json:
        """Wait for all choices.

        Raises:
            ApiError: the request was given up.
        """
        async for item in self.job.read():
            self._take(item.choice, item.event)
        wording = self._envelope.wording
        choices = []
        for index, choice in enumerate(self._choices):
            result = _finished(choice)
            log_probs = self._log_probs(result.log_probs or ())
            reason = _reason(result, choice)
            choices.append(wording.choice(index, "".join(choice.text), reason, log_probs, choice.calls))
        return self._envelope.body(choices, self._usage())

    async def stream(self, wants_usage: bool) -> AsyncIterator[str]:
        """Data of the events of a stream, one a round and choice; errors become its last event."""
        wording = self._envelope.wording
        if isinstance(wording, ChatWording):
            for index in range(len(self._choices)):
                first = wording.delta(index, "", None, None, [])
                first["delta"] = {"role": "assistant", "content": ""}
                yield _json(self._envelope.chunk([first]))
        try:
            async for item in self.job.read():
                yield _json(self._chunk(item.choice, item.event))
        except ApiError as error:
            yield _json(error.body)
        else:
            if wants_usage:
                yield _json(self._envelope.chunk([], self._usage()))
        yield DONE

    def _chunk(self, index: int, event: StreamEvent) -> Json:
        """One round of one choice."""
        choice = self._choices[index]
        num_calls, num_chars = len(choice.calls), choice.num_chars
        text = self._take(index, event)
        calls = [
            call.as_dict(number) for number, call in enumerate(choice.calls[num_calls:], start=num_calls)
        ]
        reason = None if event.result is None else _reason(event.result, choice)
        log_probs = self._log_probs(event.log_probs, num_chars)
        chunk = self._envelope.chunk([self._envelope.wording.delta(index, text, reason, log_probs, calls)])
        if self.job.work.traced:
            trace = round_trace(event, choice.num_rounds, self._texts, self._drafter)
            chunk["paceline"] = {"round": trace}
        return chunk

    def _take(self, index: int, event: StreamEvent) -> str:
        """Add a round to its choice; returns the text that may be shown."""
        choice = self._choices[index]
        choice.num_rounds += 1
        choice.num_chars += sum(len(self._texts.text(entry.token_id)) for entry in event.log_probs)
        choice.result = event.result
        if choice.reader is None:
            choice.text.append(event.text)
            return event.text
        pieces = [choice.reader.push(event.text)]
        if event.result is not None:
            pieces.append(choice.reader.finish())
        shown = "".join(piece.text for piece in pieces)
        choice.text.append(shown)
        for piece in pieces:
            choice.calls += piece.calls
        return shown

    def _log_probs(self, tokens: Seq[TokenLogProb], offset: int = 0) -> Json | None:
        """As the client asked for them."""
        shown = self.job.work.shown_log_probs
        if shown is None:
            return None
        return self._envelope.wording.log_probs(tokens, shown, self._texts, offset)

    def _usage(self) -> Json:
        """Counts of all choices."""
        return usage_of([_finished(choice) for choice in self._choices], self._num_prompts, self._drafter)


def _reason(result: GenerationResult, choice: _Choice) -> str:
    """Why a choice ended; an answer that was cut off is not one that ends in calls."""
    return "tool_calls" if choice.calls and result.finish_reason == "stop" else result.finish_reason


def _finished(choice: _Choice) -> GenerationResult:
    """The result of a choice that is complete."""
    if choice.result is None:
        raise ApiError(500, "an answer ended early", kind="server_error")
    return choice.result


def _json(body: Any) -> str:
    """Compact JSON; characters beyond ASCII stay as they are."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))
