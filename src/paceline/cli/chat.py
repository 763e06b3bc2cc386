"""`paceline chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
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
    from paceline.relaxation import Relaxation

HELP = (
    "/stats: figures of the last answer · /drafter [NAME]: what drafts · /budget [LOGITS|PRESET|off]: how "
    "lossy · /history: the conversation · /reset: start anew · Ctrl-C: stop an answer · /exit: leave"
)
OTHER_DRAFTERS = ("prompt_lookup",)


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
    generator = model.load(other_drafters=OTHER_DRAFTERS)
    if not generator.has_chat_template:
        raise RequestError(
            "this model has no chat template, so it cannot chat: use `paceline generate --raw`"
        )
    parameters = lossy.applied(sampling.parameters(generator), generator)
    session = ChatSession(Conversation(generator, parameters, system=system))
    notice(HELP)
    with contextlib.suppress(ImportError):
        # Arrow keys and the lines of this session, where the terminal can.
        import readline  # noqa: F401
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
        self._commands: Mapping[str, Callable[[str], None]] = {
            "/exit": self._exit,
            "/quit": self._exit,
            "/help": lambda _: notice(HELP),
            "/reset": self._reset,
            "/stats": lambda _: notice(self._statistics_text()),
            "/history": self._history,
            "/drafter": self._drafter,
            "/budget": self._budget,
        }
        self._statistics: GenerationStatistics | None = None

    def handle(self, said: str) -> None:
        """Run a command or answer a message; errors are shown and the session goes on."""
        said = said.strip()
        if not said:
            return
        if not said.startswith("/"):
            self._answer(said)
            return
        name, _, argument = said.partition(" ")
        command = self._commands.get(name)
        if command is None:
            notice(f"unknown command {name!r}. {HELP}")
            return
        try:
            command(argument.strip())
        except PacelineError as error:
            notice(f"error: {error}")

    def _exit(self, _: str) -> None:
        """Leave."""
        self.is_open = False

    def _reset(self, _: str) -> None:
        """Forget the conversation."""
        self.conversation.reset()
        notice("(started anew)")

    def _history(self, _: str) -> None:
        """Show what was said."""
        for message in self.conversation.messages:
            notice(f"{message['role']}: {message['content']}")

    def _drafter(self, name: str) -> None:
        """Show or choose what drafts the next answers."""
        from paceline.drafters.switching import SwitchingDrafter

        drafter = self.conversation.generator.drafter
        if not isinstance(drafter, SwitchingDrafter):
            notice("(only one drafter is loaded)")
            return
        if name:
            drafter.check(name)
            self.conversation.drafter = name
        notice(
            f"(drafter: {self.conversation.drafter or drafter.default}; loaded: {', '.join(drafter.names)})"
        )

    def _budget(self, argument: str) -> None:
        """Show or choose how far the next answers may leave the target's own choice."""
        conversation = self.conversation
        if argument == "off":
            conversation.verifier = None
        elif argument:
            parameters = conversation.parameters
            limits = _limits(argument, parameters.relaxation)
            if not parameters.is_greedy:
                raise RequestError(
                    f"temperature is {parameters.temperature:g}: budgeted verification needs temperature 0"
                )
            conversation.parameters = parameters.updated({"relaxation": limits})
            conversation.verifier = "budgeted"
        verifier = conversation.verifier or conversation.generator.verifier
        if verifier == "budgeted":
            notice(f"(budget: {conversation.parameters.relaxation.risk_budget:g} logits an answer)")
        else:
            notice("(budget: off, the text is the target's own)")

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


def _limits(argument: str, current: Relaxation) -> Relaxation:
    """Limits from a number of logits, or the name of a preset."""
    from paceline.relaxation import Relaxation

    try:
        return current.updated({"risk_budget": float(argument)})
    except ValueError:
        return Relaxation.preset(argument)
