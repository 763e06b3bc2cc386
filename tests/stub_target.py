"""A target without a network: its logits are a function of the tokens before, its cache a list of ids."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from paceline.sequence import Segment, Sequence, VerifyResult
from paceline.targets.base import TargetOutput

Law = Callable[[tuple[int, ...]], Tensor]


class StubTarget:
    """TargetModel over a table of laws. `cache` shows which ids each sequence's cache holds.

    Args:
        law: ids so far -> logits [V] of the next token.
        vocab_size: V; the hidden state is the row of logits, so D is V too.
        context_len: most tokens of a sequence.
    """

    fingerprint = "stub"
    num_layers = 1
    dtype = torch.float32
    device = torch.device("cpu")
    embedding_table = None
    output_rows = None
    layer_shape = None
    architecture_name = "Stub"
    pads_rows = True

    def __init__(self, law: Law, vocab_size: int, *, context_len: int = 1 << 20) -> None:
        self._law = law
        self.vocab_size = self.hidden_size = vocab_size
        self.context_len = context_len
        self.cache: dict[Sequence, list[int]] = {}
        self.num_forwards = 0
        self._trees: dict[Sequence, object] = {}

    def embedding(self, token_ids: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(token_ids, self.vocab_size).float()

    def lm_head(self, hidden: Tensor) -> Tensor:
        return hidden

    def forward(self, segments: Seq[Segment], features: Seq[int] = ()) -> TargetOutput:
        self.num_forwards += 1
        rows = []
        for segment in segments:
            cached = self.cache.setdefault(segment.sequence, [])
            for token_id in segment.prefix_ids:
                cached.append(token_id)
                rows.append(self._law(tuple(cached)))
            self._trees[segment.sequence] = segment.tree
            if segment.tree is not None:
                tokens, paths = segment.tree.token_ids, segment.tree.path_table
                rows += [self._law((*cached, *tokens[path[path >= 0]].tolist())) for path in paths]
        hidden = torch.stack(rows)
        return TargetOutput(hidden, dict.fromkeys(features, hidden), segments, self.lm_head)

    def commit(self, sequence: Sequence, result: VerifyResult) -> None:
        tree = self._trees[sequence]
        path = [0, *result.path[: len(result.emitted_ids) - 1]]
        self.cache[sequence] += tree.token_ids[path].tolist()

    def cached_len(self, sequence: Sequence) -> int:
        return len(self.cache.get(sequence, []))

    def adopt(self, sequence: Sequence, former: Sequence) -> int:
        old, new = self.cache.pop(former, []), sequence.token_ids
        limit = min(len(old), len(new) - 1)
        reused = next((i for i in range(limit) if old[i] != new[i]), limit)
        self.cache[sequence] = old[:reused]
        return reused

    def release(self, sequence: Sequence) -> None:
        self.cache.pop(sequence, None)


def scripted_law(prompt_ids: Seq[int], script: Seq[int], vocab_size: int, *, strength: float = 10.0) -> Law:
    """A law that follows `script` after the prompt, over and over, whatever the ids are."""

    def law(ids: tuple[int, ...]) -> Tensor:
        row = torch.zeros(vocab_size)
        row[script[max(len(ids) - len(prompt_ids), 0) % len(script)]] = strength
        return row

    return law
