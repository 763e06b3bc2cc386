"""The benchmark loop: every group of prompts goes through all arms before the next group starts.

Alternating arms prompt by prompt spreads whatever else the machine does evenly over them, and rotating
their order takes away the advantage of going first. Each arm warms up before anything is measured. Every
arm gets the same token ids; in a second turn the history is the arm's own answer.

Where lossy verifiers take part, everything is done twice: with answers that end by themselves, which shows
what they are worth, and with a fixed number of tokens, which shows how fast they come. There the strict arm
goes first and once more last. A verifier that changes how long answers are cannot be timed by the former.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import product
from time import perf_counter

from paceline.bench.arms import PLAIN, Arm, ArmAnswer, EngineArm
from paceline.bench.records import FIXED, NATURAL, GroupRecord, Journal, RecordKey, TurnRecord
from paceline.bench.suites import BenchPrompt, Suite
from paceline.engine.generator import Generator, Message
from paceline.errors import ConfigError

WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is.

    Attributes:
        num_done: finished measurements, those of an earlier start included.
        num_total: all measurements of the run.
        text: what comes next.
    """

    num_done: int
    num_total: int
    text: str


class BenchmarkRunner:
    """Runs arms over suites.

    Args:
        generator: encodes the prompts; its target is the one all arms share.
        arms: what is compared.
        suites: on which prompts.
        journal: receives the records and knows those of an earlier start.
        max_new_tokens: most tokens of an answer; an arm also stops where the text ends.
        batch_sizes: prompts decoded at once; each size is measured on its own.
        works: `records.NATURAL`, `records.FIXED` or both; only engine arms that draft do fixed work.
        clock: seconds from any fixed point; tests pass their own.
    """

    def __init__(
        self,
        generator: Generator,
        arms: Seq[Arm],
        suites: Seq[Suite],
        journal: Journal,
        *,
        max_new_tokens: int = 128,
        batch_sizes: Seq[int] = (1,),
        works: Seq[str] = (NATURAL,),
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._generator = generator
        self._arms = list(arms)
        self._suites = list(suites)
        self._journal = journal
        self._max_new_tokens = max_new_tokens
        self._batch_sizes = list(batch_sizes)
        self._works = list(works)
        self._clock = clock

    def run(self, on_progress: Callable[[Progress], None] = lambda _: None) -> None:
        """Measure everything that the journal does not have yet."""
        work = list(self._work())
        for suite in self._suites:
            for prompt in suite.prompts:
                self._room(prompt, len(self._encode([{"role": "user", "content": prompt.turns[0]}])))
        num_done = 0
        warmed_up: set[int] = set()
        for key, prompts, arm in work:
            on_progress(Progress(num_done, len(work), f"{key.suite}: {arm.name}"))
            if key not in self._journal:
                if key.batch_size not in warmed_up:
                    self._warm_up(prompts)
                    warmed_up.add(key.batch_size)
                self._journal.add(self._measure(key, prompts, arm))
            num_done += 1
        on_progress(Progress(num_done, len(work), "done"))

    def _work(self) -> Iterator[tuple[RecordKey, Seq[BenchPrompt], Arm]]:
        """All measurements in the order in which they are made."""
        number = 0
        for batch_size, suite in product(self._batch_sizes, self._suites):
            for group, start in enumerate(range(0, len(suite.prompts), batch_size)):
                prompts = suite.prompts[start : start + batch_size]
                for work in self._works:
                    for arm in _order(self._arms, work, number):
                        yield RecordKey(suite.name, batch_size, group, str(arm.name), work), prompts, arm
                number += 1

    def _warm_up(self, prompts: Seq[BenchPrompt]) -> None:
        """One short answer per arm: first calls allocate buffers and choose kernels."""
        ids = [self._encode([{"role": "user", "content": prompt.turns[0]}]) for prompt in prompts]
        for arm in self._arms:
            arm.answer(ids, min(WARM_UP_TOKENS, self._max_new_tokens))

    def _measure(self, key: RecordKey, prompts: Seq[BenchPrompt], arm: Arm) -> GroupRecord:
        """All turns of a group by one arm; the clock runs while the arm works."""
        histories: dict[str, list[Message]] = {prompt.prompt_id: [] for prompt in prompts}
        turns: list[TurnRecord] = []
        seconds = 0.0
        # Fixed work is the first turn alone: behind it every arm has a history of its own.
        num_turns = 1 if key.work == FIXED else max(len(prompt.turns) for prompt in prompts)
        for turn in range(num_turns):
            asked = [prompt for prompt in prompts if turn < len(prompt.turns)]
            for prompt in asked:
                histories[prompt.prompt_id].append({"role": "user", "content": prompt.turns[turn]})
            ids = [self._encode(histories[prompt.prompt_id]) for prompt in asked]
            # The same limit for all arms: Hugging Face would run past the context, this engine stops there.
            room = min(self._room(prompt, len(own)) for prompt, own in zip(asked, ids, strict=True))
            started = self._clock()
            answers = _answer(arm, ids, min(room, self._max_new_tokens), key.work)
            seconds += self._clock() - started
            for prompt, prompt_ids, answer in zip(asked, ids, answers, strict=True):
                histories[prompt.prompt_id].append({"role": "assistant", "content": answer.text})
                turns.append(
                    TurnRecord(
                        prompt.prompt_id,
                        turn,
                        tuple(prompt_ids),
                        answer.token_ids,
                        answer.statistics,
                        answer.log_prob,
                        answer.is_cut,
                    )
                )
        return GroupRecord(key, seconds, tuple(turns))

    def _room(self, prompt: BenchPrompt, prompt_len: int) -> int:
        """Tokens that the context leaves for an answer."""
        room = self._generator.target.context_len - prompt_len
        if room < 1:
            raise ConfigError(
                f"prompt {prompt.prompt_id!r} has {prompt_len} tokens and the target's context is "
                f"{self._generator.target.context_len}: choose another suite, or fewer --max-new-tokens"
            )
        return room

    def _encode(self, history: list[Message]) -> list[int]:
        """Token ids of a conversation; as plain text for a model without a chat template."""
        if self._generator.has_chat_template:
            return self._generator.encode_chat(history)
        return self._generator.encode("\n\n".join(message["content"] for message in history), raw=True)


def _order(arms: Seq[Arm], work: str, number: int) -> list[Arm]:
    """Arms in the order in which they answer one group: in turn, but strict ones around lossy ones."""
    if work == NATURAL:
        # A second run of the strict arm would give the same answers.
        taking_part = [arm for arm in arms if arm.name.repeat == 1]
    else:
        taking_part = [arm for arm in arms if isinstance(arm, EngineArm) and arm.name.drafter != PLAIN]
    last = [arm for arm in taking_part if arm.name.repeat > 1]
    repeated = {replace(arm.name, repeat=1) for arm in arms if arm.name.repeat > 1}
    first = [arm for arm in taking_part if arm.name in repeated]
    between = [arm for arm in taking_part if arm not in first and arm not in last]
    start = number % len(between) if between else 0
    return [*first, *between[start:], *between[:start], *last]


def _answer(arm: Arm, ids: list[list[int]], num_tokens: int, work: str) -> list[ArmAnswer]:
    """Let an arm answer."""
    if work == FIXED and isinstance(arm, EngineArm):
        return arm.answer_fixed(ids, num_tokens)
    return arm.answer(ids, num_tokens)
