"""The phrase head: from the target's hidden state to a distribution over phrases.

A small MLP reads vectors of one position, by default two of them: the last hidden state (what the target's
own output layer reads) and the input embedding of the newest token (which that hidden state does not know
yet). Its output layer has one row of `width + 1` parameters per phrase. With the default shape and D = 2560
the totals are those published for phrase-level speculative decoding on Qwen3-4B: 3.434M parameters for 8,000
phrases, 21.94M for 80,000.

A head with `chain_entries` also guesses the phrase behind a likely first one: a recurrent step takes the
state and the drafted phrase to the state behind it, which the same output layer reads, its first rows only
(entries are sorted by their use, and the step must cost little).

Every input vector is divided by its root mean square first (no parameters), since hidden states, embeddings
and inner layers differ in scale by orders of magnitude; and the head computes in its own dtype whatever the
target's is. A trunk layer is Linear, LayerNorm, GELU, with a residual connection where its width stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.config import nearest_name
from paceline.errors import ConfigError, ShapeError
from paceline.vocabularies.speculative import VocabularyRanking

INPUTS = ("hidden", "newest_token_embedding")
"""Vectors that a head may read besides layer inputs."""


@dataclass(frozen=True, slots=True)
class PhraseHeadConfig:
    """Shape of a phrase head.

    Attributes:
        hidden_size: width D of the target.
        num_entries: phrases E.
        width: columns of the output layer; it has `width + 1` parameters per phrase.
        trunk_width: width of the layers before the last one; None for `width`.
        depth: layers before the output layer, at least 1.
        inputs: vectors read, of `hidden` (after the final norm) and `newest_token_embedding`.
        feature_layers: layers of the target whose inputs are read as well.
        dropout: chance to drop a unit during training, in [0, 1).
        chain_entries: phrases, the first ones of the vocabulary, that may follow another; 0 for none.
        ranking_width: columns between the two matrices of a ranking of the phrases, which chooses those that
            are scored (a speculated vocabulary); 0: all are.
    """

    hidden_size: int
    num_entries: int
    width: int = 256
    trunk_width: int | None = None
    depth: int = 2
    inputs: tuple[str, ...] = INPUTS
    feature_layers: tuple[int, ...] = ()
    dropout: float = 0.0
    chain_entries: int = 0
    ranking_width: int = 0

    def __post_init__(self) -> None:
        """Refuse shapes that cannot be built; values can come from a file, so their types are checked too."""
        for name in ("hidden_size", "num_entries", "width", "depth", "trunk_width"):
            value = getattr(self, name)
            if not _is_whole(value, 1) and not (name == "trunk_width" and value is None):
                raise ConfigError(
                    f"phrase head: {name} is {value!r}, it must be a whole number of at least 1"
                )
        if (
            isinstance(self.dropout, bool)
            or not isinstance(self.dropout, int | float)
            or not 0 <= self.dropout < 1
        ):
            raise ConfigError(f"phrase head: dropout is {self.dropout!r}, it must be in [0, 1)")
        if not _is_whole(self.chain_entries, 0) or self.chain_entries > self.num_entries:
            raise ConfigError(
                f"phrase head: chain_entries is {self.chain_entries!r}, it must be a whole number from 0 to "
                f"the number of entries, {self.num_entries}"
            )
        if not _is_whole(self.ranking_width, 0):
            raise ConfigError(
                f"phrase head: ranking_width is {self.ranking_width!r}, it must be a whole number, 0 or more"
            )
        for name in self.inputs:
            if name not in INPUTS:
                nearest = nearest_name(str(name), INPUTS)
                raise ConfigError(f"phrase head: input {name!r} is not known, did you mean {nearest!r}?")
        if not all(_is_whole(layer, 0) for layer in self.feature_layers):
            raise ConfigError(
                f"phrase head: feature_layers is {self.feature_layers!r}, it must hold layer numbers"
            )
        if not self.num_inputs or len({*self.inputs, *self.feature_layers}) != self.num_inputs:
            raise ConfigError("phrase head: give at least one input, and each input and feature layer once")

    @property
    def num_inputs(self) -> int:
        """Vectors of width D that are read per position."""
        return len(self.inputs) + len(self.feature_layers)

    @property
    def layer_widths(self) -> tuple[int, ...]:
        """Width of every trunk layer; the last one feeds the output layer."""
        return (self.trunk_width or self.width,) * (self.depth - 1) + (self.width,)


class PhraseStep(nn.Module):
    """From the state in front of a phrase to the state behind it: two residual layers.

    The phrase is read as the embedding of its last token and the mean embedding of all of them.
    """

    def __init__(self, hidden_size: int, width: int, dropout: float) -> None:
        super().__init__()
        sizes = (width + 2 * hidden_size, width)
        self.layers = nn.ModuleList([nn.Linear(size, width) for size in sizes])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in sizes])
        self.other = nn.Linear(width, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, state: Tensor, last_embedding: Tensor, mean_embedding: Tensor) -> Tensor:
        """[M, width], [M, D], [M, D] -> [M, width]."""
        vectors = (state, last_embedding.to(state.dtype), mean_embedding.to(state.dtype))
        inputs = torch.cat([functional.rms_norm(v, v.shape[-1:]) for v in vectors], dim=-1)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            state = state + self.dropout(functional.gelu(norm(layer(inputs))))
            inputs = state
        return state


class PhraseHead(nn.Module):
    """MLP over the inputs of `config`, in order: `inputs` first, then `feature_layers`."""

    def __init__(self, config: PhraseHeadConfig) -> None:
        super().__init__()
        self.config = config
        widths = config.layer_widths
        sizes = (config.num_inputs * config.hidden_size, *widths)
        self.layers = nn.ModuleList([nn.Linear(size, widths[i]) for i, size in enumerate(sizes[:-1])])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for width in widths])
        self.output = nn.Linear(config.width, config.num_entries)
        self.dropout = nn.Dropout(config.dropout)
        self.ranking: VocabularyRanking | None = None
        if config.ranking_width:
            self.ranking = VocabularyRanking(config.width, config.num_entries, config.ranking_width)
        self.step: PhraseStep | None = None
        if config.chain_entries:
            self.step = PhraseStep(config.hidden_size, config.width, config.dropout)

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole head."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def trunk_dtype(self) -> torch.dtype:
        """Dtype in which everything before the output layer is computed."""
        return next(self.norms.parameters()).dtype

    def join_inputs(
        self, hidden: Tensor, newest_token_embedding: Tensor, features: Mapping[int, Tensor] | None = None
    ) -> Tensor:
        """Put the vectors that this head reads side by side.

        Args:
            hidden: [M, D], the state whose logits produced the newest token.
            newest_token_embedding: [M, D], input embedding of that newest token.
            features: layer -> [M, D], layer inputs at the position of `hidden`.

        Returns:
            [M, num_inputs * D], in the dtype of `hidden`.

        Raises:
            ShapeError: a feature layer is missing.
        """
        named = dict(zip(INPUTS, (hidden, newest_token_embedding), strict=True))
        parts = [named[name] for name in self.config.inputs]
        for layer in self.config.feature_layers:
            if features is None or layer not in features:
                raise ShapeError(f"the head reads the input of layer {layer}, which was not captured")
            parts.append(features[layer])
        return torch.cat([part.to(hidden.dtype) for part in parts], dim=-1)

    def trunk(self, inputs: Tensor) -> Tensor:
        """What the output layer reads: [M, num_inputs * D] -> [M, width]."""
        shape = (-1, self.config.num_inputs, self.config.hidden_size)
        vectors = inputs.to(self.trunk_dtype).view(shape)
        state = functional.rms_norm(vectors, (self.config.hidden_size,)).flatten(-2)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            update = self.dropout(functional.gelu(norm(layer(state))))
            state = state + update if update.shape == state.shape else update
        return state

    def forward(
        self, inputs: Tensor, last_embedding: Tensor | None = None, mean_embedding: Tensor | None = None
    ) -> Any:
        """Scores of all phrases, and of those behind one of them where it is given.

        Args:
            inputs: [M, num_inputs * D], in any dtype.
            last_embedding: see `chained_scores`.
            mean_embedding: likewise.

        Returns:
            [M, E] in the output layer's dtype; with a phrase a pair, that and [M, chain_entries + 1].
        """
        state = self.trunk(inputs)
        if last_embedding is None or mean_embedding is None:
            return self.phrase_scores(state)
        return self.phrase_scores(state), self.chained_scores(state, last_embedding, mean_embedding)

    def phrase_scores(self, state: Tensor) -> Tensor:
        """Scores of all phrases: [M, width], what `trunk` gives -> [M, E]."""
        scores: Tensor = self.output(state.to(self.output.weight.dtype))
        return scores

    def ranking_scores(self, state: Tensor) -> Tensor:
        """What the ranking says of all phrases, their bias included: [M, width] -> [M, E].

        Raises:
            ConfigError: the head has none.
        """
        if self.ranking is None:
            raise ConfigError("phrase head: ranking_width is 0, so there is no ranking")
        scores: Tensor = self.ranking(state)
        return scores + self.output.bias.detach().to(scores.dtype)

    def chained_scores(self, state: Tensor, last_embedding: Tensor, mean_embedding: Tensor) -> Tensor:
        """Scores of the phrases behind a drafted one.

        Args:
            state: [M, width], what `trunk` gave in front of the drafted phrase.
            last_embedding: [M, D], input embedding of its last token.
            mean_embedding: [M, D], mean input embedding of its tokens.

        Returns:
            [M, chain_entries + 1], in the output layer's dtype; the last column stands for all other text.

        Raises:
            ConfigError: the head has no step.
        """
        if self.step is None:
            raise ConfigError("phrase head: chain_entries is 0, so there are no phrases behind a first one")
        state = self.step(state, last_embedding, mean_embedding).to(self.output.weight.dtype)
        num_chained = self.config.chain_entries
        other = self.step.other
        weight = torch.cat([self.output.weight[:num_chained], other.weight.to(state.dtype)])
        bias = torch.cat([self.output.bias[:num_chained], other.bias.to(state.dtype)])
        return functional.linear(state, weight, bias)


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
