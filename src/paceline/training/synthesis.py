"""Prompts that the target writes itself, from its own chat template.

The template is rendered up to the place where a user's text begins; an opening of a few words sets the
kind, and the target goes on as the user until it ends the turn (the idea of Magpie, arXiv 2406.08464, with
openings for variety: a small model left alone writes the same few prompts). What comes out is filtered by
length, repetition and duplicates.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.drafters.none import NoDrafter
from paceline.engine.speculate import SpeculativeEngine
from paceline.sampling import SamplingParameters
from paceline.sequence import Sequence
from paceline.targets.base import TargetModel
from paceline.training.answering import run_sequences, user_turn_prefix
from paceline.training.openings import FOLLOW_UPS, OPENINGS
from paceline.training.prompts import TrainingPrompt

MIN_WORDS, MAX_WORDS = 4, 120


class Synthesiser:
    """Lets the target write prompts.

    Args:
        target: the frozen model.
        tokenizer: its tokenizer, with a chat template.
        eos_token_ids: ends of a turn.
        seed: number i of the series depends on the seed and on i alone.
        temperature: of the continuation.
        top_p: likewise.
        max_new_tokens: a prompt that does not end by then is dropped.
        follow_up_fraction: how many conversations get a second user turn.
        batch_size: prompts written at once.
    """

    def __init__(
        self,
        target: TargetModel,
        tokenizer: Any,
        *,
        eos_token_ids: frozenset[int],
        seed: int = 0,
        temperature: float = 0.8,
        top_p: float = 0.95,
        max_new_tokens: int = 96,
        follow_up_fraction: float = 0.3,
        batch_size: int = 64,
    ) -> None:
        self.target = target
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.seed = seed
        self.follow_up_fraction = follow_up_fraction
        self.parameters = SamplingParameters(
            max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p
        )
        self.engine = SpeculativeEngine(
            target, NoDrafter(), num_speculative_tokens=0, max_batch_size=batch_size
        )
        self._prefix = user_turn_prefix(tokenizer)

    def opening(self, number: int) -> tuple[str, str]:
        """Kind and opening of prompt `number`: every kind in turn."""
        kinds = sorted(OPENINGS)
        kind = kinds[number % len(kinds)]
        return kind, random.Random(f"{self.seed}/{number}").choice(OPENINGS[kind])

    def run(self, numbers: Iterator[int]) -> Iterator[tuple[int, TrainingPrompt | None]]:
        """Write the prompts of the given numbers, as they complete; None where the filter dropped one."""
        opened: dict[Sequence, int] = {}

        def following() -> Sequence | None:
            number = next(numbers, None)
            if number is None:
                return None
            text = self._prefix + self.opening(number)[1]
            sequence = Sequence(
                [int(i) for i in self.tokenizer(text, add_special_tokens=False)["input_ids"]],
                self.parameters,
                self.eos_token_ids,
                self.target.context_len,
                seed=self.seed * 1_000_003 + number,
            )
            opened[sequence] = number
            return sequence

        for sequence in run_sequences(self.engine, following):
            number = opened.pop(sequence)
            yield number, self._prompt(number, sequence)

    def _prompt(self, number: int, sequence: Sequence) -> TrainingPrompt | None:
        """The finished prompt, when it is a good one."""
        if sequence.finish_reason != "stop":
            return None
        kind, opening = self.opening(number)
        text = (opening + self.tokenizer.decode(sequence.output_ids, skip_special_tokens=True)).strip()
        if not is_good_prompt(text):
            return None
        chance = random.Random(f"{self.seed}/{number}/follow-up")
        follow_ups = (chance.choice(FOLLOW_UPS),) if chance.random() < self.follow_up_fraction else ()
        return TrainingPrompt.from_text(text, f"synthesised-{kind}", follow_ups)


def is_good_prompt(text: str) -> bool:
    """Whether a synthesised text is worth answering: neither too short, too long nor stuck in a loop."""
    words = text.casefold().split()
    if not MIN_WORDS <= len(words) <= MAX_WORDS or "\ufffd" in text:
        return False
    if len(words) >= 12:
        trigrams = list(zip(words, words[1:], words[2:], strict=False))
        return len(set(trigrams)) >= 0.7 * len(trigrams)
    return len(set(words)) >= 0.5 * len(words)


def synthesise_into(
    path: Path,
    synthesiser: Synthesiser,
    numbers: range,
    on_prompts: Callable[[int], None] | None = None,
) -> None:
    """Write the prompts of `numbers` to a JSONL file, line by line; what its folder has already is kept.

    Args:
        path: one object a line: `number` and `prompt`, which is null when the filter dropped it.
        synthesiser: writes them.
        numbers: which ones.
        on_prompts: called with how many of them are done.
    """
    done = read_synthesised(path.parent).keys() & set(numbers)
    missing = (number for number in numbers if number not in done)
    path.parent.mkdir(parents=True, exist_ok=True)
    num_done = len(done)
    with path.open("a", encoding="utf-8") as file:
        file.write("\n")  # ends a line that an interrupted run cut off
        for number, prompt in synthesiser.run(missing):
            row = {"number": number, "prompt": prompt.as_dict() if prompt else None}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            num_done += 1
            if on_prompts is not None:
                on_prompts(num_done)


def read_synthesised(folder: Path) -> dict[int, TrainingPrompt | None]:
    """Number -> prompt of all files that `synthesise_into` wrote; lines that were cut off are ignored."""
    rows: dict[int, TrainingPrompt | None] = {}
    for path in sorted(folder.glob("prompts-*.jsonl")):
        for line in path.read_text(encoding="utf-8").split("\n"):
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            rows[row["number"]] = TrainingPrompt.from_dict(row["prompt"]) if row["prompt"] else None
    return rows
