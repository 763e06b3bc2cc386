"""The contract of a target model: forward over draft trees, commit what was kept, release.

Rows of a forward are flattened: segment i's prefix rows come first, then its tree rows, then segment i + 1's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.sequence import Segment, Sequence, VerifyResult
from paceline.transfers import upload


class TargetOutput:
    """Hidden states of one forward; logits are computed only for the rows asked for.

    Attributes:
        hidden: [N, D], after the final norm: what heads and the output layer read.
        features: layer -> [N, D], the *input* of that layer (0 to L - 1).
        segments: what was fed, in row order.
    """

    def __init__(
        self,
        hidden: Tensor,
        features: dict[int, Tensor],
        segments: Seq[Segment],
        compute_logits: Callable[[Tensor], Tensor],
    ) -> None:
        self.hidden = hidden
        self.features = features
        self.segments = segments
        self._compute_logits = compute_logits
        self._starts = [0]
        for segment in segments:
            self._starts.append(self._starts[-1] + len(segment))

    def rows(self, index: int) -> range:
        """Rows of segment `index`, prefix first."""
        return range(self._starts[index], self._starts[index + 1])

    def root_row(self, index: int) -> int:
        """Row of the tree root of segment `index`; of its last prefix token when it has no tree."""
        tree = self.segments[index].tree
        return self._starts[index + 1] - (1 if tree is None else len(tree))

    def part(self, indices: Seq[int]) -> TargetOutput:
        """What belongs to some of the segments; this output itself when those are all."""
        if len(indices) == len(self.segments):
            return self
        rows = upload(
            torch.cat([torch.arange(self._starts[i], self._starts[i + 1]) for i in indices]),
            self.hidden.device,
        )
        return TargetOutput(
            self.hidden.index_select(0, rows),
            {layer: states.index_select(0, rows) for layer, states in self.features.items()},
            [self.segments[i] for i in indices],
            self._compute_logits,
        )

    def tree_logits(self) -> Tensor:
        """[sum of N_i + 1, V]: logits of all tree nodes, segments in order; prompt chunks give none."""
        tree_rows = [
            range(self.root_row(i), self._starts[i + 1])
            for i, segment in enumerate(self.segments)
            if segment.tree is not None
        ]
        num_rows = sum(map(len, tree_rows))
        if num_rows == self.hidden.shape[0]:
            return self._compute_logits(self.hidden)
        if len(tree_rows) == 1:
            return self._compute_logits(self.hidden[tree_rows[0].start : tree_rows[0].stop])
        rows = upload(torch.cat([torch.arange(r.start, r.stop) for r in tree_rows]), self.hidden.device)
        return self._compute_logits(self.hidden.index_select(0, rows))

    def logits(self, rows: Tensor) -> Tensor:
        """[len(rows), V]: logits of the given rows, in the model's dtype."""
        return self._compute_logits(self.hidden.index_select(0, rows))


@dataclass(frozen=True, slots=True)
class OutputRows:
    """Weights of a target's output layer, and what stands between products and logits.

    Attributes:
        weight: [V, D].
        bias: [V], or None.
        scale: factor of the products.
        soft_cap: bound of the logits, None without.
    """

    weight: Tensor
    bias: Tensor | None
    scale: float
    soft_cap: float | None


@dataclass(frozen=True, slots=True)
class DecoderLayerShape:
    """What a layer of the target looks like: the shape that a one-layer draft head takes over.

    Attributes:
        intermediate_size: of the MLP.
        num_heads: attention heads.
        num_kv_heads: heads of keys and values.
        head_dim: width of a head.
        rope_parameters: rotary positions of full attention, as transformers' configurations have them.
        max_position_embeddings: positions that rotary scaling starts from.
        norm_eps: of the norms.
    """

    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_parameters: Mapping[str, Any]
    max_position_embeddings: int
    norm_eps: float


class TargetModel(Protocol):
    """A frozen model that scores draft trees. `cached_len(s) == len(s) - 1` holds between rounds."""

    fingerprint: str
    """Identifies weights and tokenizer; empty when unknown."""

    @property
    def architecture_name(self) -> str:
        """Class of the model, as its configuration names it: `LlamaForCausalLM`."""

    @property
    def vocab_size(self) -> int:
        """Rows of the output layer."""

    @property
    def hidden_size(self) -> int:
        """Width D of the hidden state."""

    @property
    def num_layers(self) -> int:
        """Number of layers L."""

    @property
    def context_len(self) -> int:
        """Most tokens that one sequence may have."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights and of the hidden state."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""

    @property
    def embedding_table(self) -> Tensor | None:
        """[V, D]: weights of the input embeddings, unscaled, where they lie in one table; else None."""

    @property
    def output_rows(self) -> OutputRows | None:
        """The output layer row by row, for drafters that score some of them; None where it is not shown."""

    @property
    def layer_shape(self) -> DecoderLayerShape | None:
        """Sizes of the target's own layers; None where it does not know them."""

    @property
    def pads_rows(self) -> bool:
        """Whether a forward computes as many rows for every sequence as for the widest one."""

    def embedding(self, token_ids: Tensor) -> Tensor:
        """Input embeddings of tokens, scaled as the model scales them: [...] -> [..., D]."""

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states, with the model's bias, scale and soft-cap: [..., D] -> [..., V]."""

    def forward(self, segments: Seq[Segment], features: Seq[int] = ()) -> TargetOutput:
        """Score the segments in one forward and write their keys and values behind the cached ones."""

    def commit(self, sequence: Sequence, result: VerifyResult) -> None:
        """Keep the accepted path of the last forward's tree in the cache; drop the other nodes."""

    def cached_len(self, sequence: Sequence) -> int:
        """Tokens of the sequence whose keys and values are cached."""

    def adopt(self, sequence: Sequence, former: Sequence) -> int:
        """Let `sequence` take over the cache of a finished sequence as far as their tokens agree.

        Returns:
            How many tokens are reused; `former` is released.
        """

    def release(self, sequence: Sequence) -> None:
        """Free the cache of a sequence."""
