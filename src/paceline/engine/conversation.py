"""A conversation that keeps the target's cache from turn to turn.

The next prompt is the whole conversation rendered anew, so an answer depends on the messages alone; the
cache of the former turn is reused exactly as far as its ids agree with the new ones. A turn with reuse
therefore gives the ids of a cold run, and reads only what was added.
"""

from __future__ import annotations

from collections import abc

from paceline.engine.generator import Answer, GenerationResult, Generator, Message, StreamEvent
from paceline.errors import RequestError
from paceline.sampling import SamplingParameters


class Conversation:
    """Messages so far, and the cache behind them.

    Args:
        generator: answers; several conversations may share one.
        parameters: for every turn; the generator's own by default.
        system: first message, when given.

    Attributes:
        drafter: of the next turns, of several that the generator has loaded; None: its first.
        verifier: of the next turns; None: the generator's.
        messages: the conversation, newest last; an interrupted answer stays as far as it came.
        num_reused_tokens: cached tokens that the newest turn did not have to read again.
    """

    def __init__(
        self, generator: Generator, parameters: SamplingParameters | None = None, *, system: str | None = None
    ) -> None:
        self.generator = generator
        self.parameters = parameters or generator.default_parameters
        self.drafter: str | None = None
        self.verifier: str | None = None
        self.messages: list[Message] = []
        self.num_reused_tokens = 0
        self._system = system
        self._former: Answer | None = None
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.close()
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def close(self) -> None:
        """Free the cache; the messages stay, and a later turn starts cold."""
        if self._former is not None:
            self.generator.engine.release(self._former.sequence)
            self._former = None

    def ask(self, text: str) -> GenerationResult:
        """Say something and wait for the whole answer."""
        result = None
        for event in self.stream(text):
            result = event.result
        if result is None:
            raise RequestError("the answer was interrupted: ask again")
        return result

    def stream(self, text: str) -> abc.Generator[StreamEvent, None, None]:
        """Say something; an event per round of the answer.

        Closing the iterator early stops the answer: what has been said stays in the conversation.

        Raises:
            RequestError: the conversation no longer fits the context; nothing was added to it.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt_ids = self.generator.encode_chat(messages)
        answer = self.generator.open(
            prompt_ids,
            self.parameters,
            former=self._former,
            keeps_cache=True,
            drafter=self.drafter,
            verifier=self.verifier,
        )
        self._former = None
        self.num_reused_tokens = self.generator.target.cached_len(answer.sequence)
        self.messages = messages
        said: list[str] = []
        is_complete = False
        try:
            for indexed in self.generator.run([answer]):
                said.append(indexed.event.text)
                is_complete = indexed.event.result is not None
                yield indexed.event
        finally:
            self.messages.append({"role": "assistant", "content": "".join(said)})
            if is_complete:
                self._former = answer
            else:
                # Stopped in the middle of a round, the cache may hold a draft: the next turn starts cold.
                self.generator.engine.release(answer.sequence)
