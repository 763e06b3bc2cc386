"""Logits processors on draft trees: every node is processed with its own history.

A verifier may only see what plain decoding would see at the same place, so each row is processed as if the
text up to its node were already written. The order is that of Hugging Face `generate`: bias, repetition
penalty (then presence and frequency, which it does not have), repeated n-grams, bad words, minimum length.
A grammar comes last, so that nothing makes a token possible again that it forbids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import Protocol

import torch
from torch import Tensor

from paceline.engine.bans import BadWords, MinNewTokens, NoRepeatNgram
from paceline.engine.grammar import GrammarProcessor, GrammarTokenizer
from paceline.engine.penalties import LogitBias, OccurrencePenalty, RepetitionPenalty
from paceline.errors import RequestError
from paceline.sampling import SamplingParameters
from paceline.sequence import Sequence
from paceline.tree import DraftTree

_BANS = (NoRepeatNgram, BadWords, MinNewTokens)


class TreeProcessor(Protocol):
    """Changes the logits of a tree's nodes; one instance serves one sequence."""

    def apply(self, logits: Tensor, tree: DraftTree, sequence: Sequence) -> None:
        """Change logits in place.

        Args:
            logits: float32 [N + 1, V], row i predicts the token after node i.
            tree: the tree; its root is the sequence's newest token.
            sequence: the committed text.

        Raises:
            RequestError: the request cannot be served any further.
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
        or parameters.grammar is not None
    )


def build_processors(
    sequence: Sequence,
    vocab_size: int,
    device: torch.device,
    grammars: GrammarTokenizer | None = None,
) -> list[TreeProcessor]:
    """Processors that a sequence's parameters ask for, in the order in which they act; often none.

    Args:
        sequence: a new one.
        vocab_size: V.
        device: where the logits are.
        grammars: what a grammar needs of the tokenizer; requests with a grammar are refused without it.

    Raises:
        RequestError: a biased or bad token is not in the vocabulary, or the grammar cannot be followed.
    """
    parameters = sequence.parameters
    if not needs_processing(parameters):
        return []
    _check_ids("logit_bias", parameters.logit_bias, vocab_size)
    _check_ids("bad_words", [i for word in parameters.bad_words for i in word], vocab_size)
    processors: list[TreeProcessor] = [*_penalties(sequence, vocab_size, device), *_bans(sequence, device)]
    if parameters.grammar is not None:
        if grammars is None:
            raise RequestError("this engine serves no grammars, it has no tokenizer: use a Generator")
        bans_by_bias = float("-inf") in parameters.logit_bias.values()
        has_bans = bans_by_bias or any(isinstance(own, _BANS) for own in processors)
        processors.append(GrammarProcessor(parameters.grammar, grammars, sequence, has_bans=has_bans))
    return processors


def _penalties(sequence: Sequence, vocab_size: int, device: torch.device) -> Iterator[TreeProcessor]:
    """Processors that move logits."""
    parameters = sequence.parameters
    if parameters.logit_bias:
        yield LogitBias(parameters.logit_bias, device)
    if parameters.repetition_penalty != 1:
        penalty = parameters.repetition_penalty
        yield RepetitionPenalty(penalty, sequence.token_ids, vocab_size, device)
    if parameters.presence_penalty or parameters.frequency_penalty:
        presence, frequency = parameters.presence_penalty, parameters.frequency_penalty
        yield OccurrencePenalty(presence, frequency, sequence.output_ids, vocab_size, device)


def _bans(sequence: Sequence, device: torch.device) -> Iterator[TreeProcessor]:
    """Processors that make tokens impossible."""
    parameters = sequence.parameters
    if parameters.no_repeat_ngram_size:
        yield NoRepeatNgram(parameters.no_repeat_ngram_size, sequence.token_ids, device)
    # As in Hugging Face, an end-of-sequence id alone is not a bad word: min_new_tokens is there for that.
    ends = {(i,) for i in sequence.eos_token_ids}
    words = [word for word in parameters.bad_words if tuple(word) not in ends]
    if words:
        yield BadWords(words, device)
    if parameters.min_new_tokens and sequence.eos_token_ids:
        yield MinNewTokens(parameters.min_new_tokens, sequence.eos_token_ids, device)


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raise RequestError unless all ids are tokens of the target."""
    bad = next((i for i in ids if not 0 <= i < vocab_size), None)
    if bad is not None:
        raise RequestError(f"{name} has token id {bad}: ids of this target are 0 to {vocab_size - 1}")
