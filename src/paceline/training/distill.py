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

import json
import os
import random
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.drafters.base import Drafter
from paceline.engine.speculate import SpeculativeEngine
from paceline.errors import CheckpointError, ConfigError
from paceline.sampling import SamplingParameters
from paceline.sequence import Sequence, VerifyResult
from paceline.targets.base import TargetModel, TargetOutput
from paceline.training.answering import chat_ids, run_sequences
from paceline.training.prompts import TrainingPrompt
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


@dataclass(frozen=True, slots=True)
class Answer:
    """One answered prompt.

    Attributes:
        key: of the prompt.
        root_key: of the first prompt of its conversation.
        source: of the prompt.
        prompt_ids: int64 [P].
        output_ids: int64 [T].
        states: [T, 1 + L, D], final hidden state and inputs of the recorded layers; row j produced newest
            token j:
            the last prompt id for 0, output j - 1 after that.
        is_complete: the target ended the answer itself; False when it was cut by length.
    """

    key: str
    root_key: str
    source: str
    prompt_ids: Tensor
    output_ids: Tensor
    states: Tensor
    is_complete: bool

    @property
    def newest_ids(self) -> Tensor:
        """int64 [T]: the newest token that the drafter knows at each row."""
        return torch.cat([self.prompt_ids[-1:], self.output_ids[:-1]])


def write_shard(path: Path, answers: Seq[Answer]) -> None:
    """Write answers to one safetensors file, atomically."""
    records = [[a.key, a.root_key, a.source] for a in answers]
    tensors = {
        "prompt_ids": torch.cat([a.prompt_ids for a in answers]).to(torch.int32),
        "prompt_lens": torch.tensor([len(a.prompt_ids) for a in answers]),
        "output_ids": torch.cat([a.output_ids for a in answers]).to(torch.int32),
        "output_lens": torch.tensor([len(a.output_ids) for a in answers]),
        "states": torch.cat([a.states for a in answers]),
        "is_complete": torch.tensor([a.is_complete for a in answers]),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    save_file(tensors, str(partial), metadata={"answers": json.dumps(records)})
    os.replace(partial, path)


def shard_paths(folder: Path) -> list[Path]:
    """Finished shards, oldest first."""
    return sorted(folder.glob("shard-*.safetensors"))


def read_shard(path: Path) -> Iterator[Answer]:
    """Answers of one shard; their states are views of one memory-mapped tensor."""
    try:
        with safe_open(str(path), framework="pt") as file:
            records = json.loads(file.metadata()["answers"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:
        raise CheckpointError(
            f"{path.name} is damaged ({error}): delete it, and its prompts are answered again"
        ) from None
    prompts = tensors["prompt_ids"].long().split(tensors["prompt_lens"].tolist())
    outputs = tensors["output_ids"].long().split(tensors["output_lens"].tolist())
    states = tensors["states"].split(tensors["output_lens"].tolist())
    complete = tensors["is_complete"].tolist()
    for record, prompt, output, rows, whole in zip(records, prompts, outputs, states, complete, strict=True):
        yield Answer(record[0], record[1], record[2], prompt, output, rows, whole)


def read_answers(folder: Path) -> Iterator[Answer]:
    """Answers of all finished shards, oldest first, each prompt once."""
    seen: set[str] = set()
    for path in shard_paths(folder):
        for answer in read_shard(path):
            if answer.key not in seen:
                seen.add(answer.key)
                yield answer


def predicted_bytes(num_tokens: int, hidden_size: int, num_layers: int = 0) -> int:
    """Disk for the shards of `num_tokens` output tokens: states in bf16, ids, and prompts as long."""
    return num_tokens * ((1 + num_layers) * hidden_size * 2 + 8)


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
            for sequence in run_sequences(self.engine, lambda: self._next(is_enough), on_round):
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


def check_disk(folder: Path, num_bytes: int, max_bytes: int | None) -> None:
    """Raise ConfigError when the predicted shards exceed the limit or the free space.

    Args:
        folder: on the disk in question; its nearest existing parent is asked.
        num_bytes: predicted.
        max_bytes: the user's limit; None for the free space alone.
    """
    import shutil

    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    held = sum(path.stat().st_size for path in shard_paths(folder)) if folder.exists() else 0
    wanted = max(num_bytes - held, 0)
    if max_bytes is not None and num_bytes > max_bytes:
        raise ConfigError(
            f"the answers will take {num_bytes / 1e9:.2f} GB and the limit is {max_bytes / 1e9:.2f} GB: "
            "raise --max-disk-gb or lower --num-tokens"
        )
    if wanted > free:
        raise ConfigError(
            f"the answers will take {wanted / 1e9:.2f} GB more and {free / 1e9:.2f} GB are free"
        )


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
