"""Keep an engine busy: submit prompts as room appears, hand back what finishes.

New sequences are admitted a few at a time, because a prefill forward costs almost the same for one short
prompt as for four; the batch therefore runs between "full" and "full less `ADMIT_TOGETHER`".
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

from paceline.engine.speculate import SpeculativeEngine
from paceline.errors import RequestError
from paceline.sequence import Sequence

ADMIT_TOGETHER = 6


def run_sequences(
    engine: SpeculativeEngine,
    next_sequence: Callable[[], Sequence | None],
    on_round: Callable[[int], None] | None = None,
) -> Generator[Sequence, None, None]:
    """Finished sequences, in order of completion.

    Args:
        engine: decodes `engine.max_batch_size` sequences at once.
        next_sequence: the next one to run; None when there is none at the moment.
        on_round: called with the number of tokens that each round emitted.

    Sequences that are under way when the iterator is closed, or interrupted, are given up.
    """
    running: set[Sequence] = set()
    try:
        yield from _run(engine, running, next_sequence, on_round)
    finally:
        for sequence in running:
            engine.release(sequence)


def _run(
    engine: SpeculativeEngine,
    running: set[Sequence],
    next_sequence: Callable[[], Sequence | None],
    on_round: Callable[[int], None] | None,
) -> Iterator[Sequence]:
    """The loop; `running` holds what is under way."""
    exhausted = False
    while True:
        free = engine.max_batch_size - len(running)
        if free >= min(ADMIT_TOGETHER, engine.max_batch_size) or (exhausted and free):
            exhausted = False
            while len(running) < engine.max_batch_size and not exhausted:
                sequence = next_sequence()
                exhausted = sequence is None
                if sequence is not None:
                    running.add(sequence)
                    engine.submit(sequence)
        if not running:
            return
        outcomes = engine.round()
        if on_round is not None:
            on_round(sum(len(outcome.result.emitted_ids) for outcome in outcomes))
        for outcome in outcomes:
            if outcome.sequence.is_finished:
                running.discard(outcome.sequence)
                yield outcome.sequence


def chat_ids(tokenizer: Any, messages: Any) -> list[int]:
    """Token ids of a conversation, ready for the assistant's turn; raw text without a chat template."""
    if not getattr(tokenizer, "chat_template", None):
        text = "\n\n".join(message["content"] for message in messages)
        return [int(i) for i in tokenizer(text)["input_ids"]]
    ids = tokenizer.apply_chat_template(
        [dict(message) for message in messages], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return [int(i) for i in ids]


def user_turn_prefix(tokenizer: Any) -> str:
    """What the chat template writes in front of a user's text in a new conversation.

    Raises:
        RequestError: the tokenizer has no chat template, or the template changes the text.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise RequestError("this target has no chat template, so it cannot write prompts: give --data")
    sentinel = "paceline-user-text"
    rendered: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": sentinel}], add_generation_prompt=False, tokenize=False
    )
    prefix, found, _ = rendered.partition(sentinel)
    if not found:
        raise RequestError("the chat template does not contain the user's text as it is: give --data")
    return prefix
