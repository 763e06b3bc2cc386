"""Phrase drafting: the frozen target's hidden state predicts whole phrases, all merged into one tree.

After a round the drafter keeps the hidden state whose logits produced the newest token. To draft, a small
head turns that state and the newest token's embedding into probabilities of thousands of phrases; every node
of the phrase trie is worth the probability beneath it, and the most valuable nodes are the draft tree
(`vocabularies/trie.py`). A head with a step adds phrases behind the likeliest ones
(`vocabularies/chains.py`). One head evaluation serves all sequences, and so does one transfer to the host: of
the chosen nodes, not of all probabilities.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from paceline.drafters.compiled_phrase import CompiledPhrases
from paceline.drafters.phrase_trees import PhraseTrees
from paceline.errors import CheckpointError, ConfigError
from paceline.heads.checkpoint import LoadedHead, default_head, load_head
from paceline.heads.phrase import PhraseHead
from paceline.sequence import Sequence, VerifyResult
from paceline.targets.base import TargetModel, TargetOutput
from paceline.targets.loading import cpu_has_bfloat16
from paceline.transfers import upload
from paceline.tree import DraftTree

CHAINED_SEQUENCES = 4
"""Sequences that get second phrases in one round, at most: in larger batches few nodes each are verified,
and drafting further ahead costs more than it brings."""


@dataclass(frozen=True, slots=True)
class _State:
    """The vectors behind the newest token of one sequence.

    Attributes:
        vectors: [1 + feature layers, D]: last hidden state, then layer inputs.
        num_tokens: tokens of the sequence up to and including the one whose state this is.
    """

    vectors: Tensor
    num_tokens: int


class PhraseDrafter:
    """Drafts with a trained phrase head.

    Args:
        target: the model that will verify.
        loaded: a head trained for it.

    Raises:
        CheckpointError: the head was made for a target of another shape.
    """

    def __init__(self, target: TargetModel, loaded: LoadedHead) -> None:
        _check_fit(target, loaded)
        self._target = target
        self._head = _ready_to_draft(loaded.head, target.device)
        trie, token_ids = loaded.vocabulary.trie, loaded.vocabulary.token_ids
        compiled = CompiledPhrases.where_possible(self._head, trie, token_ids, target.embedding_table)
        self._trees = compiled or PhraseTrees(self._head, trie, token_ids, target.embedding)
        self.required_features: tuple[int, ...] = loaded.config.feature_layers
        self._states: dict[Sequence, _State] = {}

    @classmethod
    def build(cls, target: TargetModel, head: Path | None, num_speculative_tokens: int) -> Self:  # noqa: ARG003
        """Load a head folder, by default the one shipped for `target`.

        Raises:
            ConfigError: no head is given and none is shipped for this target.
            CheckpointError: the folder is damaged or does not fit the target.
        """
        folder = head or default_head(target.fingerprint)
        if folder is None:
            raise ConfigError(
                "no phrase head is shipped for this target: give the folder of a trained one (head), train "
                "one with `paceline train phrase`, or use drafter 'prompt_lookup' or 'none'"
            )
        return cls(target, load_head(folder))

    @torch.inference_mode()
    def propose(self, sequences: Seq[Sequence], max_nodes: int) -> list[DraftTree]:
        """The most valuable phrase nodes of every sequence; only a root where no state is known yet."""
        ready = [sequence for sequence in sequences if self._is_ready(sequence)]
        drafted: dict[Sequence, DraftTree] = {}
        if ready and max_nodes >= 1:
            trees = self._trees.draft(
                self._inputs(ready),
                [sequence.last_token_id for sequence in ready],
                max_nodes,
                has_chains=len(ready) <= CHAINED_SEQUENCES,
            )
            drafted = dict(zip(ready, trees, strict=True))
        return [drafted.get(s) or DraftTree.root_only(s.last_token_id) for s in sequences]

    def observe(self, output: TargetOutput, results: Seq[VerifyResult | None]) -> None:
        """Keep the state behind each sequence's newest token, or that of a prompt chunk's last token."""
        rows: list[int] = []
        kept: list[tuple[Sequence, int]] = []
        for i, (segment, result) in enumerate(zip(output.segments, results, strict=True)):
            sequence = segment.sequence
            if result is None:
                rows.append(output.root_row(i))
                kept.append((sequence, self._target.cached_len(sequence)))
            elif result.emitted_ids:
                rows.append(output.root_row(i) + result.rows[-1])
                kept.append((sequence, len(sequence) - 1))
        if not rows:
            return
        index = upload(torch.tensor(rows), output.hidden.device)
        layers = [output.hidden, *(output.features[layer] for layer in self.required_features)]
        # A copy: views would keep the states of the whole forward alive. Written `layer[index]` it would wake
        # torch's threads, which then spin on the cores that drafting is about to use.
        vectors = torch.stack([layer.index_select(0, index) for layer in layers], dim=1)
        for (sequence, num_tokens), state in zip(kept, vectors, strict=True):
            self._states[sequence] = _State(state, num_tokens)

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        self._states.pop(sequence, None)

    def _is_ready(self, sequence: Sequence) -> bool:
        """Whether the state kept is the one right before the newest token; inside a long prompt it is not."""
        state = self._states.get(sequence)
        return state is not None and state.num_tokens == len(sequence) - 1

    def _inputs(self, sequences: list[Sequence]) -> Tensor:
        """[M, num_inputs * D]: what the head reads."""
        vectors = torch.stack([self._states[sequence].vectors for sequence in sequences], dim=1)
        newest = torch.tensor([sequence.last_token_id for sequence in sequences])
        features = dict(zip(self.required_features, vectors[1:], strict=True))
        return self._head.join_inputs(vectors[0], self._target.embedding(newest), features)


def _ready_to_draft(head: PhraseHead, device: torch.device) -> PhraseHead:
    """A frozen copy on the target's device.

    Scoring the phrases means reading the whole output layer, so on processors with bf16 arithmetic that layer
    is kept in bf16: half the bytes, half the time. The trunk stays in fp32.
    """
    ready = PhraseHead(head.config)
    ready.load_state_dict(head.state_dict())
    ready = ready.to(device).eval().requires_grad_(False)
    if device.type == "cpu" and cpu_has_bfloat16():
        ready.output.to(torch.bfloat16)
        if ready.ranking is not None:
            ready.ranking.vocabulary.to(torch.bfloat16)
    return ready


def _check_fit(target: TargetModel, loaded: LoadedHead) -> None:
    """Refuse a head of the wrong shape; warn when it was trained on another model of the right shape."""
    if loaded.config.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"the head reads hidden states of width {loaded.config.hidden_size}, "
            f"the target's have {target.hidden_size}"
        )
    outside = [layer for layer in loaded.config.feature_layers if not 0 <= layer < target.num_layers]
    if outside:
        raise CheckpointError(
            f"the head reads layers {outside}, the target has layers 0 to {target.num_layers - 1}"
        )
    largest = max(max(ids) for ids in loaded.vocabulary.token_ids)
    if largest >= target.vocab_size:
        raise CheckpointError(
            f"a phrase has token id {largest}, the target has ids 0 to {target.vocab_size - 1}"
        )
    trained_on = loaded.provenance.get("target_fingerprint")
    if trained_on != target.fingerprint:
        warnings.warn(
            f"the head was trained for target {trained_on}, this one is {target.fingerprint}: "
            "text stays right, but fewer tokens will be accepted",
            stacklevel=3,
        )
