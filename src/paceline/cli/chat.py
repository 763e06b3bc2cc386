"""`paceline chat`: a conversation in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Option

from paceline.cli.console import notice, summary
from paceline.cli.option_groups import expand_options
from paceline.cli.options import ModelOptions, SamplingOptions
from paceline.cli.relaxation_options import RelaxationOptions
from paceline.errors import PacelineError, RequestError

if TYPE_CHECKING:
    from paceline.engine.conversation import Conversation
    from paceline.engine.stats import GenerationStatistics

HELP = "/stats: figures of the last answer · /reset: start anew · Ctrl-C: stop an answer · /exit: leave"


@expand_options
def chat(
    model: ModelOptions,
    sampling: SamplingOptions,
    lossy: RelaxationOptions,
    system: Annotated[str | None, Option(help="System message.")] = None,
) -> None:
    """Talk to the model; it remembers the conversation."""
    from paceline.engine.conversation import Conversation

    sampling.check()
    lossy.relaxation()
    generator = model.load()
    if not generator.has_chat_template:
        raise RequestError(
            "this model has no chat template, so it cannot chat: use `paceline generate --raw`"
        )
    parameters = lossy.applied(sampling.parameters(generator), generator)
    session = ChatSession(Conversation(generator, parameters, system=system))
    notice(HELP)
    while session.is_open:
        try:
            said = input("> ")
        except EOFError:
            break
        session.handle(said)


class ChatSession:
    """Acts on what the user typed.

    Args:
        conversation: the messages and their cache.
    """

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.is_open = True
        self._statistics: GenerationStatistics | None = None

    def handle(self, said: str) -> None:
        """Run a command or answer a message; errors are shown and the session goes on."""
        match said.strip():
            case "":
                return
            case "/exit" | "/quit":
                self.is_open = False
            case "/help":
                notice(HELP)
            case "/reset":
                self.conversation.reset()
                notice("(started anew)")
            case "/stats":
                notice(self._statistics_text())
            case command if command.startswith("/"):
                notice(f"unknown command {command!r}. {HELP}")
            case _:
                self._answer(said)

    def _answer(self, said: str) -> None:
        """Stream one answer; Ctrl-C stops it and keeps what was said."""
        events = self.conversation.stream(said)
        try:
            for event in events:
                print(event.text, end="", flush=True)
                if event.result is not None:
                    self._statistics = event.result.statistics
            print()
        except KeyboardInterrupt:
            events.close()
            print()
            notice("(stopped)")
        except PacelineError as error:
            notice(f"error: {error}")

    def _statistics_text(self) -> str:
        """Figures of the newest answer."""
        if self._statistics is None:
            return "(no answer yet)"
        reused = self.conversation.num_reused_tokens
        return f"{summary(self._statistics)}, {reused} tokens of the conversation were still cached"
