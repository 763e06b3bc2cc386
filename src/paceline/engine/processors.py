"""Logits processors on draft trees: every node is processed with its own history.

A verifier may only see what plain decoding would see at the same place, so each row is processed as if the
text up to its node were already written. The order is that of Hugging Face `generate`: bias, repetition
penalty (then presence and frequency, which it does not have), repeated n-grams, bad words, minimum length.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Protocol

import torch
from torch import Tensor

from paceline.engine.bans import BadWords, MinNewTokens, NoRepeatNgram
from paceline.engine.penalties import LogitBias, OccurrencePenalty, RepetitionPenalty
from paceline.errors import RequestError
from paceline.sampling import SamplingParameters
from paceline.sequence import Sequence
from paceline.tree import DraftTree


class TreeProcessor(Protocol):
    """Changes the logits of a tree's nodes; one instance serves one sequence."""

    def apply(self, logits: Tensor, tree: DraftTree, sequence: Sequence) -> None:
        """Change logits in place.

        Args:
            logits: float32 [N + 1, V], row i predicts the token after node i.
            tree: the tree; its root is the sequence's newest token.
            sequence: the committed text.
        """

    def extend(self, ids: Seq[int]) -> None:
        """Take note of tokens that were added to the sequence."""


def needs_processing(parameters: SamplingParameters) -> bool:
    """Whether a request changes logits before temperature and filters."""
    return bool(
        parameters.logit_bias
        or parameters.repetition_penalty != 1
        or parameters.presence_penalty
        or parameters.frequency_penalty
        or parameters.no_repeat_ngram_size
        or parameters.bad_words
        or parameters.min_new_tokens
    )


def build_processors(sequence: Sequence, vocab_size: int, device: torch.device) -> list[TreeProcessor]:
    """Processors that a sequence's parameters ask for, in the order in which they act; often none.

    Raises:
        RequestError: a biased or bad token is not in the vocabulary.
    """
    parameters = sequence.parameters
    if not needs_processing(parameters):
        return []
    _check_ids("logit_bias", parameters.logit_bias, vocab_size)
    _check_ids("bad_words", [i for word in parameters.bad_words for i in word], vocab_size)
    processors: list[TreeProcessor] = []
    if parameters.logit_bias:
        processors.append(LogitBias(parameters.logit_bias, device))
    if parameters.repetition_penalty != 1:
        penalty = parameters.repetition_penalty
        processors.append(RepetitionPenalty(penalty, sequence.token_ids, vocab_size, device))
    if parameters.presence_penalty or parameters.frequency_penalty:
        presence, frequency = parameters.presence_penalty, parameters.frequency_penalty
        processors.append(OccurrencePenalty(presence, frequency, sequence.output_ids, vocab_size, device))
    if parameters.no_repeat_ngram_size:
        processors.append(NoRepeatNgram(parameters.no_repeat_ngram_size, sequence.token_ids, device))
    # As in Hugging Face, an end-of-sequence id alone is not a bad word: min_new_tokens is there for that.
    ends = {(i,) for i in sequence.eos_token_ids}
    words = [word for word in parameters.bad_words if tuple(word) not in ends]
    if words:
        processors.append(BadWords(words, device))
    if parameters.min_new_tokens and sequence.eos_token_ids:
        processors.append(MinNewTokens(parameters.min_new_tokens, sequence.eos_token_ids, device))
    return processors


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raise RequestError unless all ids are tokens of the target."""
    bad = next((i for i in ids if not 0 <= i < vocab_size), None)
    if bad is not None:
        raise RequestError(f"{name} has token id {bad}: ids of this target are 0 to {vocab_size - 1}")
