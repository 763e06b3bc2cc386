"""The target answers the training prompts; what the head needs is recorded while it generates.

Every answer is stored as it was generated, token for token, beside the hidden rows that the target computed
anyway: no second forward is needed and no re-rendering can differ from what generation does. Row j of an
answer is the final hidden state that *produced* the newest token j (the last prompt token for j = 0, output
token j - 1 afterwards), so that (row j, newest token j) is exactly what the drafter knows when it has to
guess outputs j, j + 1, ...

Answers are written in shards, each atomically. A shard's prompts are known by key, so an interrupted or
enlarged run goes on where it stopped, and prompts that were answered once are never answered again.
"""

from __future__ import annotations

import random
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from paceline.drafters.base import Drafter
from paceline.engine.speculate import SpeculativeEngine
from paceline.errors import CheckpointError
from paceline.sampling import SamplingParameters
from paceline.sequence import Sequence, VerifyResult
from paceline.targets.base import TargetModel, TargetOutput
from paceline.training.answering import chat_ids, run_sequences
from paceline.training.prompts import TrainingPrompt
from paceline.training.shards import Answer, read_answers, shard_paths, write_shard
from paceline.tree import DraftTree

TOKENS_PER_SHARD = 32_768
LENGTH_WINDOW = 1024


class RecordingDrafter:
    """Wraps a drafter and keeps, for every sequence, the states that produced each newest token.

    Args:
        inner: the drafter that drafts.
        feature_layers: layers whose inputs are kept beside the final hidden state.
        dtype: in which states are kept.
    """

    def __init__(
        self, inner: Drafter, feature_layers: Seq[int] = (), *, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.inner = inner
        self.feature_layers = tuple(feature_layers)
        self.dtype = dtype
        self.required_features = tuple(sorted({*inner.required_features, *feature_layers}))
        self._states: dict[Sequence, list[Tensor]] = {}

    @classmethod
    def build(cls, target: TargetModel, head: Path | None, num_speculative_tokens: int) -> Self:
        """Record plain decoding."""
        from paceline.drafters.none import NoDrafter

        return cls(NoDrafter.build(target, head, num_speculative_tokens))

    def propose(self, sequences: Seq[Sequence], max_nodes: int) -> list[DraftTree]:
        """What the wrapped drafter proposes."""
        return self.inner.propose(sequences, max_nodes)

    def observe(self, output: TargetOutput, results: Seq[VerifyResult | None]) -> None:
        """Keep the states of the committed tokens, in order."""
        planes = [output.hidden, *(output.features[layer] for layer in self.feature_layers)]
        states = torch.stack([plane.to(dtype=self.dtype, device="cpu") for plane in planes], dim=1)
        for index, result in enumerate(results):
            segment = output.segments[index]
            kept = self._states.setdefault(segment.sequence, [])
            root = output.root_row(index)
            if result is None:
                kept[:] = [
                    states[root : root + 1].clone()
                ]  # the row that predicts the next chunk's first token
                continue
            if segment.prefix_ids:
                kept[:] = [states[root - 1 : root].clone()]
            kept.append(states[[root + node for node in result.rows]])
        self.inner.observe(output, results)

    def take(self, sequence: Sequence) -> Tensor:
        """[T, 1 + L, D]: row j produced newest token j (see the module docstring), for T outputs.

        A prompt of one token has no row before it: its row 0 is zero.
        """
        states = torch.cat(self._states.pop(sequence))
        num_outputs = len(sequence.output_ids)
        if states.shape[0] == num_outputs:
            states = torch.cat([torch.zeros_like(states[:1]), states])
        if states.shape[0] != num_outputs + 1:
            raise CheckpointError(f"{states.shape[0]} recorded rows for {num_outputs} output tokens")
        return states[:num_outputs]

    def release(self, sequence: Sequence) -> None:
        """States stay until they are taken; the wrapped drafter forgets the sequence."""
        self.inner.release(sequence)


def by_similar_length(prompts: Seq[TrainingPrompt], window: int = LENGTH_WINDOW) -> list[TrainingPrompt]:
    """Reorder prompts so that neighbours are of similar length.

    Sequences of a batch are padded to the longest one, and attention pays for the padding. Sorting inside
    windows, up and down in turn, avoids most of it and still leaves an unbiased choice to a run that ends
    early.
    """
    ordered: list[TrainingPrompt] = []
    for number, start in enumerate(range(0, len(prompts), window)):
        part = prompts[start : start + window]
        ordered += sorted(
            part, key=lambda prompt: sum(len(m["content"]) for m in prompt.messages), reverse=number % 2 == 1
        )
    return ordered


class Distiller:
    """Answers prompts until enough tokens are there.

    Args:
        target: the frozen model.
        tokenizer: its tokenizer.
        drafter: how the answers are generated; the text does not depend on it.
        eos_token_ids: ends of an answer.
        folder: where shards go; existing ones are kept and counted.
        parameters: how to answer.
        feature_layers: layers to record beside the final hidden state.
        seed: of sampled answers, combined with the prompt's key.
        batch_size: prompts answered at once.
        num_speculative_tokens: most drafted nodes per round.
        tokens_per_shard: output tokens after which a shard is written.
        shard_prefix: distinguishes the shards of processes that work side by side.
    """

    def __init__(
        self,
        target: TargetModel,
        tokenizer: Any,
        drafter: Drafter,
        *,
        eos_token_ids: frozenset[int],
        folder: Path,
        parameters: SamplingParameters,
        feature_layers: Seq[int] = (),
        seed: int = 0,
        batch_size: int = 64,
        num_speculative_tokens: int = 0,
        tokens_per_shard: int = TOKENS_PER_SHARD,
        shard_prefix: str = "0",
    ) -> None:
        self.target = target
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.folder = folder
        self.parameters = parameters
        self.seed = seed
        self.tokens_per_shard = tokens_per_shard
        self.shard_prefix = shard_prefix
        self.recorder = RecordingDrafter(drafter, feature_layers)
        self.engine = SpeculativeEngine(
            target, self.recorder, num_speculative_tokens=num_speculative_tokens, max_batch_size=batch_size
        )
        self.num_too_long = 0
        self._queue: deque[TrainingPrompt] = deque()
        self._open: dict[Sequence, TrainingPrompt] = {}
        self._finished: list[Answer] = []
        self._done: set[str] = set()
        self._num_tokens = 0
        self._num_open_tokens = 0

    def run(
        self, prompts: Seq[TrainingPrompt], is_enough: Callable[[int], bool], on_tokens: Callable[[int], None]
    ) -> int:
        """Answer `prompts` in order until there are enough output tokens or no prompt is left.

        Answers under way when it is enough are finished, so that long ones are not lost more often than short
        ones. Interrupting writes what is finished before the interrupt goes on.

        Args:
            prompts: conversations; follow-ups are asked after their first answers.
            is_enough: asked before each new prompt, with the output tokens finished or under way.
            on_tokens: told the same number after each round.

        Returns:
            Output tokens of these prompts' answers in all shards.
        """
        self._resume(prompts)
        self._num_open_tokens = 0
        on_tokens(self._num_tokens)

        def on_round(num_emitted: int) -> None:
            self._num_open_tokens += num_emitted
            on_tokens(self._num_tokens + self._num_open_tokens)

        try:
            running = run_sequences(self.engine, lambda: self._next(is_enough), on_round)
            with closing(running) as finished:
                for sequence in finished:
                    self._collect(sequence)
        except KeyboardInterrupt:
            with uninterrupted():
                self._flush()
            raise
        self._flush()
        return self._num_tokens

    def _resume(self, prompts: Seq[TrainingPrompt]) -> None:
        """Count what the shards hold already, and find the follow-ups that are still to be asked."""
        self._queue = deque(by_similar_length(prompts))
        self._done.clear()
        self._num_tokens = 0
        waiting = {prompt.key: prompt for prompt in prompts}
        answers = {answer.key: answer for answer in read_answers(self.folder)}
        # A follow-up's key is known once its first turn is answered; several rounds for longer conversations.
        pending = [key for key in waiting if key in answers]
        while pending:
            key = pending.pop()
            self._done.add(key)
            self._num_tokens += len(answers[key].output_ids)
            following = waiting[key].followed(self._text(answers[key].output_ids))
            if following is None:
                continue
            waiting[following.key] = following
            if following.key in answers:
                pending.append(following.key)
            else:
                self._queue.append(following)

    def _text(self, output_ids: Tensor) -> str:
        """An answer as it appears in the history of the next turn."""
        text: str = self.tokenizer.decode(output_ids.tolist(), skip_special_tokens=True)
        return text.strip()

    def _next(self, is_enough: Callable[[int], bool]) -> Sequence | None:
        """The next prompt that was not answered yet; None when there is none or enough is under way."""
        while self._queue and not is_enough(self._num_tokens + self._num_open_tokens):
            prompt = self._queue.popleft()
            key = prompt.key
            if key in self._done:
                continue
            self._done.add(key)
            prompt_ids = chat_ids(self.tokenizer, prompt.messages)
            if (
                not prompt_ids
                or len(prompt_ids) + (self.parameters.max_new_tokens or 1) > self.target.context_len
            ):
                self.num_too_long += 1
                continue
            sequence = Sequence(
                prompt_ids,
                self.parameters,
                self.eos_token_ids,
                self.target.context_len,
                seed=random.Random(f"{self.seed}/{key}").getrandbits(63),
            )
            self._open[sequence] = prompt
            return sequence
        return None

    def _collect(self, sequence: Sequence) -> None:
        """Keep a finished answer, queue its follow-up, write a shard when it is full."""
        prompt = self._open.pop(sequence)
        output_ids = torch.tensor(sequence.output_ids)
        self._finished.append(
            Answer(
                prompt.key,
                prompt.root_key,
                prompt.source,
                torch.tensor(sequence.prompt_ids),
                output_ids,
                self.recorder.take(sequence),
                sequence.finish_reason == "stop",
            )
        )
        self._num_tokens += len(output_ids)
        self._num_open_tokens -= len(output_ids)
        following = prompt.followed(self._text(output_ids))
        if following is not None and following.key not in self._done:
            self._queue.appendleft(following)
        if sum(len(a.output_ids) for a in self._finished) >= self.tokens_per_shard:
            self._flush()

    def _flush(self) -> None:
        """Write the finished answers as the next shard."""
        if not self._finished:
            return
        prefix = f"shard-{self.shard_prefix}-"
        taken = [
            path.stem.removeprefix(prefix)
            for path in shard_paths(self.folder)
            if path.stem.startswith(prefix)
        ]
        number = max((int(digits) for digits in taken), default=-1) + 1
        write_shard(self.folder / f"{prefix}{number:05d}.safetensors", self._finished)
        self._finished = []


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C inside the block: a second one must not cut off the saving that the first one started."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
