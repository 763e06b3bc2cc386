"""EAGLE drafting: a one-layer head guesses token by token, a beam of guesses at a time.

EAGLE-2 (arXiv 2406.16858) grows a dynamic tree: at every depth the `top_k` likeliest nodes so far each name
`top_k` successors, and in the end all nodes are ranked by their likelihood from the root. EAGLE-3 (arXiv
2503.01840) drafts alike with another head. A beam of one is a chain.

The head's own cache holds, for committed tokens, what the *target's* features gave, never what the drafter
guessed: after every round the features of the accepted path are read from the target's forward, and the next
proposal begins by running them through the head.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor

from paceline.drafters.compiled_eagle import CompiledEagleLayer
from paceline.drafters.eagle_cache import EagleCache, Sight
from paceline.drafters.eagle_vocabularies import vocabulary_of
from paceline.errors import CheckpointError, ConfigError
from paceline.heads.checkpoint import default_head
from paceline.heads.eagle import EagleHead, EagleStates
from paceline.heads.eagle_folder import LoadedEagle
from paceline.heads.formats.eagle_checkpoint import read_eagle
from paceline.sequence import Sequence, VerifyResult
from paceline.targets.base import TargetModel, TargetOutput
from paceline.transfers import upload
from paceline.tree import DraftTree
from paceline.vocabularies.base import OutputVocabulary

LARGE_TREE, SMALL_TREE = (10, 7), (4, 5)
"""Beam and depth: of the published tree of 60 nodes, and of trees of at most `SMALL_NODES`, whose published
depth is not known; this one is ours."""
SMALL_NODES = 16
LEAST_ALIVE = 0.5
"""On a CPU: the draft ends where its beam holds less of the likelihood than this. A further level then brings
fewer tokens than its own time is worth; elsewhere levels cost little, and the answer would be waited for."""
CHOOSING_LEVELS = 1
"""Levels of a draft for which a speculated vocabulary chooses its candidates anew; further ones score the
last choice again, which saves rankings of the whole vocabulary (docs/algorithms/eagle.md: the price)."""
CHUNK = 512
"""Most committed positions that go through the head at once."""


@dataclass(slots=True)
class _Features:
    """Committed positions that have not been through the head yet.

    Attributes:
        first: position of the sequence that stands at place 0 of the head's cache: 0, or where a taken-over
            cache of the target ended, whose features nobody has.
        parts: [n, D] each, fused, of successive positions.
        end: position behind the last one that is known.
        last: the head's states [D] at the position before `end`, once all parts have been through it.
    """

    first: int
    parts: list[Tensor]
    end: int
    last: EagleStates | None = None


@dataclass(frozen=True, slots=True)
class _Level:
    """Nodes of one depth, of B sequences.

    Attributes:
        token_ids: int64 [B, n].
        log_probs: fp32 [B, n], summed from the root.
        parents: int64 [B, n], number of the node above among those of the level above.
    """

    token_ids: Tensor
    log_probs: Tensor
    parents: Tensor


@dataclass(frozen=True, slots=True)
class _Grown:
    """A draft of B sequences.

    Attributes:
        levels: from the root downwards.
        depths: of each sequence, how many of them are its own.
    """

    levels: list[_Level]
    depths: list[int]


class EagleDrafter:
    """Drafts with an EAGLE head.

    Args:
        target: the model that will verify.
        head: trained for it; on the target's device.
        vocabulary: what its states are scored with.
        top_k: beam, and successors of each of its nodes; 1 drafts a chain. None: by the size of the tree.
        depth: tokens ahead; likewise.
        least_alive: see `LEAST_ALIVE`; 0 goes on to `depth`.
        choosing_levels: see `CHOOSING_LEVELS`.
    """

    vocabulary_name: ClassVar[str] = "full"
    """Of `eagle_vocabularies.VOCABULARIES`, for `build`."""

    def __init__(
        self,
        target: TargetModel,
        head: EagleHead,
        vocabulary: OutputVocabulary,
        *,
        top_k: int | None = None,
        depth: int | None = None,
        least_alive: float = LEAST_ALIVE,
        choosing_levels: int = CHOOSING_LEVELS,
    ) -> None:
        if min(top_k or 1, depth or 1) < 1 or 0 in (top_k, depth):
            raise ConfigError(f"top_k {top_k}, depth {depth}: both start at 1")
        config = head.config
        self._target = target
        self._head = head
        self._vocabulary = vocabulary
        self.top_k = top_k
        self.depth = depth
        self.least_alive = least_alive
        self.choosing_levels = choosing_levels
        self.required_features: tuple[int, ...] = config.feature_layers
        self._cache = EagleCache(config.num_kv_heads, config.head_dim, head.dtype, target.device)
        self._compiled = CompiledEagleLayer.where_possible(head)
        self._features: dict[Sequence, _Features] = {}

    @classmethod
    def build(cls, target: TargetModel, head: Path | None, num_speculative_tokens: int) -> Self:  # noqa: ARG003
        """Load a head folder, ours or a published checkpoint; by default the one shipped for `target`.

        Raises:
            ConfigError: no head is given and none is shipped for this target.
            CheckpointError: the folder is damaged or does not fit the target.
        """
        folder = head or default_head(target.fingerprint, "eagle3")
        if folder is None:
            raise ConfigError(
                "no EAGLE head is shipped for this target: give the folder of one (head), or use another "
                "drafter"
            )
        loaded = read_eagle(folder, num_layers=target.num_layers, vocab_size=target.vocab_size)
        check_fit(target, loaded)
        layer = loaded.head.to(target.device, target.dtype).requires_grad_(False)
        drafter = cls(target, layer, vocabulary_of(cls.vocabulary_name, target, loaded))
        if drafter._compiled is not None:
            drafter._compiled.drop_layer()
        return drafter

    @torch.inference_mode()
    def observe(self, output: TargetOutput, results: Seq[VerifyResult | None]) -> None:
        """Keep the features of the prompt chunks and of the accepted paths."""
        layers = [output.features[layer] for layer in self.required_features] or [output.hidden]
        for number, (segment, result) in enumerate(zip(output.segments, results, strict=True)):
            sequence = segment.sequence
            rows = list(output.rows(number))[: len(segment.prefix_ids)]
            if result is None:
                end = self._target.cached_len(sequence)
            else:
                # Root and path, as far as they were accepted: the newest token has no features yet.
                rows += [output.root_row(number) + row for row in result.rows]
                end = len(sequence) - 1
            if rows:
                index = upload(torch.tensor(rows), output.hidden.device)
                states = torch.stack([layer.index_select(0, index) for layer in layers], dim=1)
                self._keep(sequence, states, end)

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        self._features.pop(sequence, None)
        self._cache.release(sequence)

    @torch.inference_mode()
    def propose(self, sequences: Seq[Sequence], max_nodes: int) -> list[DraftTree]:
        """The likeliest nodes of every sequence; only a root where features are missing."""
        ready = [s for s in sequences if max_nodes >= 1 and self._is_ready(s)]
        trees: dict[Sequence, DraftTree] = {}
        if ready:
            usual = SMALL_TREE if max_nodes <= SMALL_NODES else LARGE_TREE
            beam, depth = min(self.top_k or usual[0], max_nodes), self.depth or usual[1]
            self._cache.open(ready, self._num_pending(ready) + depth * beam)
            last = self._catch_up(ready)
            grown = self._grow(ready, last, beam, depth, max_nodes)
            trees = dict(zip(ready, _trees(ready, grown, max_nodes), strict=True))
        return [trees.get(s) or DraftTree.root_only(s.last_token_id) for s in sequences]

    def _keep(self, sequence: Sequence, states: Tensor, end: int) -> None:
        """Put features aside until the next proposal."""
        start = end - len(states)
        known = self._features.get(sequence)
        if known is None or known.end != start:
            # Nothing known in front of these: the head's cache begins here.
            self._cache.release(sequence)
            known = self._features[sequence] = _Features(start, [], start)
        known.parts.append(self._head.fuse(states))
        known.end = end
        num_pending = sum(map(len, known.parts))
        if num_pending >= CHUNK:
            # Of long prompts, and where nothing is drafted for long, nothing piles up.
            self._cache.open([sequence], num_pending)
            self._catch_up([sequence])

    def _is_ready(self, sequence: Sequence) -> bool:
        """Whether the features of all tokens but the newest are known."""
        known = self._features.get(sequence)
        return known is not None and known.end == len(sequence) - 1

    def _num_pending(self, sequences: list[Sequence]) -> int:
        return max(sum(map(len, self._features[s].parts)) for s in sequences)

    def _catch_up(self, sequences: list[Sequence]) -> EagleStates:
        """Run the committed positions that are new through the head: states of the last one, [B, 1, D]."""
        new = [sequence for sequence in sequences if self._features[sequence].parts]
        pending = [torch.cat(self._features[sequence].parts) for sequence in new]
        for start in range(0, max(map(len, pending), default=0), CHUNK):
            states = self._run_committed(new, [part[start : start + CHUNK] for part in pending])
            for number, (sequence, part) in enumerate(zip(new, pending, strict=True)):
                row = len(part) - 1 - start
                if 0 <= row < CHUNK:
                    ends = EagleStates(states.fed_back[number, row], states.final[number, row])
                    self._features[sequence].last = ends
        for sequence in new:
            self._features[sequence].parts.clear()
        found = [last for sequence in sequences if (last := self._features[sequence].last) is not None]
        return EagleStates(
            torch.stack([last.fed_back for last in found])[:, None],
            torch.stack([last.final for last in found])[:, None],
        )

    def _run_committed(self, sequences: list[Sequence], parts: list[Tensor]) -> EagleStates:
        """One chunk of every sequence; shorter ones are padded behind, where nobody looks."""
        device = self._target.device
        width = max(map(len, parts))
        features = parts[0].new_zeros(len(parts), width, *parts[0].shape[1:])
        token_ids = torch.zeros(len(parts), width, dtype=torch.int64)
        starts = torch.tensor([self._cache.lengths[s] for s in sequences])
        positions = torch.empty(len(parts), width, dtype=torch.int64)
        for number, (sequence, part) in enumerate(zip(sequences, parts, strict=True)):
            features[number, : len(part)] = part
            first = self._features[sequence].first + int(starts[number])
            # The token behind each position; the newest one stands behind the last.
            token_ids[number, : len(part)] = torch.tensor(
                sequence.token_ids[first + 1 : first + 1 + len(part)], dtype=torch.int64
            )
            positions[number] = torch.arange(first, first + width)
            self._cache.lengths[sequence] += len(part)
        in_order = starts[:, None] + torch.arange(1, width + 1)
        sight = Sight(sequences, starts, in_order, in_order.new_empty(len(parts), width, 0))
        return self._step(upload(token_ids, device), features, positions, sight)

    def _grow(
        self, sequences: list[Sequence], last: EagleStates, beam: int, depth: int, max_nodes: int
    ) -> _Grown:
        """Levels of the tree, the likeliest nodes of each named by their successors."""
        num_sequences, device = len(sequences), self._target.device
        lengths = torch.tensor([self._cache.lengths[s] for s in sequences])
        firsts = torch.tensor([self._features[s].first for s in sequences])
        found = self._vocabulary.candidates(last.final[:, 0], num_sequences)
        best = found.best(beam)
        width = best.entry_ids.shape[1]
        levels = [_Level(best.entry_ids, best.log_probs, torch.zeros_like(best.entry_ids))]
        chosen = torch.arange(width, device=device).expand(num_sequences, width)
        state = last.fed_back.expand(-1, width, -1)
        # Places in the cache of the nodes above each node of the beam, itself included.
        above = torch.empty(num_sequences, width, 0, dtype=torch.int64)
        # Whether a sequence's draft goes on is its own matter, whoever else is in the batch.
        depths = torch.full((num_sequences,), depth)
        for level_depth in range(1, depth):
            self._end_faint(depths, levels, chosen)
            if bool((depths <= level_depth).all()) or self._is_done(levels, chosen, max_nodes):
                break
            level = levels[-1]
            token_ids, log_probs = level.token_ids.gather(1, chosen), level.log_probs.gather(1, chosen)
            starts = lengths + (level_depth - 1) * width
            own = starts[:, None, None] + torch.arange(width)[None, :, None]
            above = torch.cat([above, own.expand(num_sequences, width, 1)], dim=2)
            sight = Sight(sequences, starts, lengths[:, None].expand(num_sequences, width), above)
            positions = (firsts + lengths + level_depth - 1)[:, None].expand(num_sequences, width)
            states = self._step(token_ids, state, positions, sight)
            held = found.choice if level_depth >= self.choosing_levels else None
            found = self._vocabulary.candidates(states.final.flatten(0, 1), num_sequences, held)
            best = found.best(beam)
            num_next = best.entry_ids.shape[1]
            summed = log_probs[:, :, None] + best.log_probs.view(num_sequences, width, num_next)
            levels.append(
                _Level(
                    best.entry_ids.view(num_sequences, -1),
                    summed.flatten(1),
                    chosen.repeat_interleave(num_next, dim=1),
                )
            )
            chosen = levels[-1].log_probs.topk(width, dim=1).indices
            parents = chosen // num_next
            state = states.fed_back.gather(1, parents[:, :, None].expand(-1, -1, states.fed_back.shape[2]))
            on_host = parents.cpu()
            above = above.gather(1, on_host[:, :, None].expand(-1, -1, above.shape[2]))
        return _Grown(levels, depths.tolist())

    def _end_faint(self, depths: Tensor, levels: list[_Level], chosen: Tensor) -> None:
        """End the drafts whose beam holds too little of the likelihood; on a CPU alone, see `LEAST_ALIVE`.

        Args:
            depths: int64 [B], levels that each draft has at most; lowered.
            levels: so far.
            chosen: int64 [B, n], the beam among the newest of them.
        """
        if chosen.device.type != "cpu":
            return
        alive = levels[-1].log_probs.gather(1, chosen).exp().sum(dim=1)
        depths[alive < self.least_alive] = depths[alive < self.least_alive].clamp(max=len(levels))

    def _is_done(self, levels: list[_Level], chosen: Tensor, max_nodes: int) -> bool:
        """Whether nothing further down can be among the likeliest `max_nodes`: likelihoods only fall.

        Asked on a CPU alone: elsewhere the answer would have to be waited for.
        """
        if chosen.device.type != "cpu":
            return False
        known = torch.cat([level.log_probs for level in levels], dim=1)
        if known.shape[1] < max_nodes:
            return False
        worst = known.topk(max_nodes, dim=1).values[:, -1]
        likeliest = levels[-1].log_probs.gather(1, chosen).amax(dim=1)
        return bool((likeliest < worst).all())

    def _step(self, token_ids: Tensor, state: Tensor, positions: Tensor, sight: Sight) -> EagleStates:
        """The head at B times T positions; keys and values go to their places."""
        embedding = self._target.embedding(token_ids)
        if self._compiled is not None:
            # Positions count from the first one of the cache: only their distances matter.
            return self._compiled.step(embedding, state, self._cache, sight)
        device = self._target.device
        visible = upload(sight.visible, device)

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return self._cache.attend(sight, visible, queries, keys, values)

        found: EagleStates = self._head(embedding, state, upload(positions, device), attend)
        return found


def _trees(sequences: list[Sequence], grown: _Grown, max_nodes: int) -> list[DraftTree]:
    """The likeliest nodes of every sequence, after one transfer; a root where likelihoods are no numbers."""
    levels = grown.levels
    sizes = [level.token_ids.shape[1] for level in levels]
    whole = torch.stack(
        [
            torch.cat([level.token_ids for level in levels], 1),
            torch.cat([level.parents for level in levels], 1),
        ]
    )
    log_probs = torch.cat([level.log_probs for level in levels], 1).cpu()
    token_ids, parents = whole.cpu()
    return [
        DraftTree.root_only(sequence.last_token_id)
        if bool(log_probs[number].isnan().any())
        else DraftTree.from_topk(
            sequence.last_token_id,
            torch.split(token_ids[number], sizes)[: grown.depths[number]],
            torch.split(log_probs[number], sizes)[: grown.depths[number]],
            torch.split(parents[number], sizes)[: grown.depths[number]],
            max_nodes,
        )
        for number, sequence in enumerate(sequences)
    ]


class StaticEagleDrafter(EagleDrafter):
    """Drafts from a fixed subset of the vocabulary."""

    vocabulary_name: ClassVar[str] = "static"


class SpeculativeEagleDrafter(EagleDrafter):
    """Drafts from a vocabulary that is chosen at every step (SpecVocab, arXiv 2602.13836)."""

    vocabulary_name: ClassVar[str] = "speculative"


def check_fit(target: TargetModel, loaded: LoadedEagle) -> None:
    """Refuse a head of the wrong shape; warn when it was trained on another model of the right shape."""
    config = loaded.head.config
    if (config.target_hidden_size, config.hidden_size) != (target.hidden_size, target.hidden_size):
        raise CheckpointError(
            f"the head reads features of width {config.target_hidden_size} and has states of "
            f"{config.hidden_size}, the target's have {target.hidden_size}"
        )
    outside = [layer for layer in config.feature_layers if not 0 <= layer < target.num_layers]
    if outside:
        raise CheckpointError(
            f"the head reads layers {outside}, the target has layers 0 to {target.num_layers - 1}"
        )
    for what, size in (
        ("ranking", None if loaded.ranking is None else loaded.ranking.vocabulary.out_features),
        ("static vocabulary", None if loaded.static_ids is None else int(loaded.static_ids[-1]) + 1),
    ):
        if size is not None and size > target.vocab_size:
            raise CheckpointError(
                f"the head's {what} has token ids up to {size - 1}, the target has {target.vocab_size} tokens"
            )
    trained_on = loaded.provenance.get("target_fingerprint")
    if trained_on is not None and trained_on != target.fingerprint:
        warnings.warn(
            f"the head was trained for target {trained_on}, this one is {target.fingerprint}: "
            "text stays right, but fewer tokens will be accepted",
            stacklevel=3,
        )
