"""States of given texts by one teacher-forced pass: for layers or texts that were not recorded.

Texts are fed in chunks through the target's own forward, packed several at a time; a packed text never sees
another one, because every text is a sequence of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import RequestError
from paceline.sampling import SamplingParameters
from paceline.sequence import Segment, Sequence
from paceline.targets.base import TargetModel
from paceline.training.shards import Answer

CHUNK_LEN = 512


@dataclass(frozen=True, slots=True)
class Conversation:
    """A tokenised text and which of its tokens the assistant wrote.

    Attributes:
        token_ids: int64 [S].
        is_answer: bool [S], true for the assistant's tokens, the end of turn included.
    """

    token_ids: Tensor
    is_answer: Tensor

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to learn from."""
        return not bool(self.is_answer.any())


def conversation(prompt_ids: Seq[int], full_ids: Seq[int]) -> Conversation:
    """Mask by prefix difference: what comes after the prompt is the answer, whatever the template says.

    Raises:
        RequestError: the text does not begin with the prompt.
    """
    if list(full_ids[: len(prompt_ids)]) != list(prompt_ids):
        raise RequestError(
            "the conversation does not begin with its prompt: training would not see what decoding sees"
        )
    is_answer = torch.arange(len(full_ids)) >= len(prompt_ids)
    return Conversation(torch.tensor(list(full_ids), dtype=torch.int64), is_answer)


def capture_states(
    target: TargetModel,
    texts: Seq[Tensor],
    *,
    feature_layers: Seq[int] = (),
    chunk_len: int = CHUNK_LEN,
    dtype: torch.dtype = torch.bfloat16,
) -> list[Tensor]:
    """States at every position of some texts, in one packed pass.

    Args:
        target: the frozen model.
        texts: int64 [S_i] each, at least one token.
        feature_layers: layers whose inputs are wanted beside the final hidden state.
        chunk_len: most tokens of each text per forward.
        dtype: of the result.

    Returns:
        Per text [S_i, 1 + L, D] on the CPU: final hidden state, then the layers' inputs.
    """
    sequences = [_teacher_forced(target, text) for text in texts]
    collected: list[list[Tensor]] = [[] for _ in texts]
    try:
        for start in range(0, max(map(len, texts)), chunk_len):
            pending = [i for i, text in enumerate(texts) if start < len(text)]
            segments = [
                Segment(sequences[i], tuple(texts[i][start : start + chunk_len].tolist()), None)
                for i in pending
            ]
            output = target.forward(segments, feature_layers)
            planes = [output.hidden, *(output.features[layer] for layer in feature_layers)]
            states = torch.stack([plane.to(dtype=dtype, device="cpu") for plane in planes], dim=1)
            for place, i in enumerate(pending):
                rows = output.rows(place)
                collected[i].append(states[rows.start : rows.stop].clone())
    finally:
        for sequence in sequences:
            target.release(sequence)
    return [torch.cat(parts) for parts in collected]


def _teacher_forced(target: TargetModel, text: Tensor) -> Sequence:
    """A sequence whose tokens are all given."""
    return Sequence(text.tolist(), SamplingParameters(), frozenset(), target.context_len + 1, seed=0)


def recapture(
    target: TargetModel,
    answers: Iterable[Answer],
    *,
    feature_layers: Seq[int],
    batch_size: int = 8,
    on_tokens: Callable[[int], None] | None = None,
) -> Iterator[Answer]:
    """The same answers with the states of other layers.

    Args:
        target: the model that wrote them.
        answers: recorded answers.
        feature_layers: layers wanted beside the final hidden state.
        batch_size: answers per pass.
        on_tokens: told the output tokens so far.
    """
    num_tokens = 0
    batch: list[Answer] = []
    for answer in (*answers, None):
        if answer is not None:
            batch.append(answer)
        if batch and (answer is None or len(batch) == batch_size):
            texts = [torch.cat([a.prompt_ids, a.output_ids[:-1]]) for a in batch]
            states = capture_states(target, texts, feature_layers=feature_layers)
            for old, captured in zip(batch, states, strict=True):
                yield replaced(old, captured)
                num_tokens += len(old.output_ids)
            if on_tokens is not None:
                on_tokens(num_tokens)
            batch = []


def replaced(answer: Answer, captured: Tensor) -> Answer:
    """`answer` with the states of its own rows out of those of its whole text.

    Args:
        answer: T outputs after P prompt tokens.
        captured: [P + T - 1, 1 + L, D]; position i produced token i + 1.
    """
    num_prompt, num_rows = len(answer.prompt_ids), len(answer.output_ids)
    before_first = (
        captured[num_prompt - 2 : num_prompt - 1] if num_prompt > 1 else torch.zeros_like(captured[:1])
    )
    states = torch.cat([before_first, captured[num_prompt - 1 : num_prompt + num_rows - 2]])
    return Answer(
        answer.key,
        answer.root_key,
        answer.source,
        answer.prompt_ids,
        answer.output_ids,
        states,
        answer.is_complete,
    )
