"""Candidate phrases: the runs of whole tokens in the target's own text that could become entries.

Whole tokens, so that the expansion of a phrase is what the target really emits. A run

- may begin at any token, because after a partly accepted phrase the next position can be anywhere, even
  inside a word; it ends where a word or a punctuation mark ends, and holds at most `max_words` words;
- may be any single token, which is what covers the rest;
- may hold an end-of-text token as its last one only: no phrase runs past the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError
from paceline.vocabularies.segmentation import word_edges
from paceline.vocabularies.token_text import TokenText

_Int = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token sequences joined end to end, with what mining needs to know about every one of the N tokens.

    Attributes:
        token_ids: int64 [N].
        run_ends: int64 [N], position after the last token that a phrase beginning here may hold.
        ends_word: bool [N], whether a word may end behind the token.
        weight_before: int64 [N], see `WordEdges.weight`, at the edge before the token.
        weight_after: int64 [N], at the edge behind it.
    """

    token_ids: _Int
    run_ends: _Int
    ends_word: NDArray[np.bool_]
    weight_before: _Int
    weight_after: _Int


@dataclass(frozen=True, slots=True)
class Candidates:
    """C runs of tokens that could become phrases; shorter ones come first.

    Attributes:
        positions: int64 [C], where in the corpus each occurs first.
        lengths: int64 [C], tokens.
        counts: int64 [C], occurrences.
        parents: int64 [C], longest candidate that is a proper prefix, or -1.
    """

    positions: _Int
    lengths: _Int
    counts: _Int
    parents: _Int

    def token_ids(self, corpus: Corpus, index: int) -> tuple[int, ...]:
        """Tokens of one candidate."""
        start = int(self.positions[index])
        return tuple(corpus.token_ids[start : start + int(self.lengths[index])].tolist())


def read_corpus(sequences: Iterable[list[int]], text: TokenText, eos_token_ids: frozenset[int]) -> Corpus:
    """Join the sequences and find their word boundaries.

    Raises:
        ConfigError: there is no token, or a token that the tokenizer does not know.
    """
    parts: list[tuple[_Int, NDArray[np.bool_], _Int]] = []
    # Control tokens are no text; a line break keeps the words around them apart.
    pieces = [
        b"\n" if token_id in text.special_ids or token_id in eos_token_ids else piece
        for token_id, piece in enumerate(text.pieces)
    ]
    for sequence in sequences:
        ids = np.asarray(sequence, dtype=np.int64)
        if not len(ids):
            continue
        outside = ids[(ids < 0) | (ids >= len(pieces))]
        if len(outside):
            raise ConfigError(
                f"token id {outside[0]} in the text: the tokenizer has ids 0 to {len(pieces) - 1}"
            )
        edges = word_edges([pieces[token_id] for token_id in sequence])
        parts.append((ids, edges.is_boundary, edges.weight))
    if not parts:
        raise ConfigError("there is no text to mine phrases from: give at least one sequence with tokens")
    token_ids = np.concatenate([ids for ids, _, _ in parts])
    return Corpus(
        token_ids,
        _run_ends(token_ids, [len(ids) for ids, _, _ in parts], text.special_ids, eos_token_ids),
        np.concatenate([is_boundary[1:] for _, is_boundary, _ in parts]),
        np.concatenate([weight[:-1] for _, _, weight in parts]),
        np.concatenate([weight[1:] for _, _, weight in parts]),
    )


def _run_ends(
    token_ids: _Int, lengths: list[int], special_ids: frozenset[int], eos_token_ids: frozenset[int]
) -> _Int:
    """First position at or after each one that a phrase may not enter."""
    is_eos = np.isin(token_ids, list(eos_token_ids))
    is_barrier = np.isin(token_ids, list(special_ids)) & ~is_eos
    is_stop = np.zeros(len(token_ids) + 1, dtype=bool)
    is_stop[np.cumsum(lengths)] = True
    is_stop[:-1] |= is_barrier
    is_stop[1:] |= is_eos
    stops = np.flatnonzero(is_stop)
    positions = np.arange(len(token_ids))
    # The stop after the position itself; a barrier's own run is empty.
    run_ends = stops[np.searchsorted(stops, positions, side="right")]
    return np.where(is_barrier, positions, run_ends)


def find_candidates(corpus: Corpus, *, max_weight: int, max_tokens: int, min_count: int) -> Candidates:
    """All runs that occur `min_count` times, end with a word and are not too long.

    Runs grow by one token per pass over the positions that are still frequent: a run is never more frequent
    than its prefix.
    """
    ids = corpus.token_ids
    stride = int(ids.max()) + 1
    positions = np.flatnonzero(corpus.run_ends > np.arange(len(ids)))
    run = np.zeros(len(positions), dtype=np.int64)  # number of the run that stands at each position
    # Longest candidate that is a prefix of each run, the run itself included.
    run_candidate = np.full(1, -1, dtype=np.int64)
    found: list[tuple[_Int, _Int, _Int, _Int]] = []
    num_found = 0
    for length in range(1, max_tokens + 1):
        last = positions + length - 1
        keys, first, inverse, counts = np.unique(
            run * stride + ids[last], return_index=True, return_inverse=True, return_counts=True
        )
        ends = corpus.ends_word[last]
        ends &= corpus.weight_after[last] - corpus.weight_before[positions] <= max_weight
        num_ends = np.bincount(inverse[ends], minlength=len(keys))
        is_candidate = counts >= min_count if length == 1 else num_ends >= min_count
        parents = run_candidate[keys // stride]
        run_candidate = parents.copy()
        run_candidate[is_candidate] = num_found + np.arange(int(is_candidate.sum()))
        lengths = np.full(int(is_candidate.sum()), length, dtype=np.int64)
        found.append((positions[first[is_candidate]], lengths, counts[is_candidate], parents[is_candidate]))
        num_found += len(lengths)
        # Words already complete behind the last token count against the limit of any longer run.
        grows = (counts[inverse] >= min_count) & (positions + length < corpus.run_ends[positions])
        grows &= corpus.weight_after[last] - corpus.weight_before[positions] <= max_weight
        positions, run = positions[grows], inverse[grows]
        if not len(positions):
            break
    return Candidates(*(np.concatenate(column) for column in zip(*found, strict=True)))


def drop_spelling_variants(corpus: Corpus, candidates: Candidates, text: TokenText) -> Candidates:
    """Keep the most frequent of several token sequences that spell the same text: strings are distinct."""
    best: dict[bytes, int] = {}
    counts = candidates.counts.tolist()
    keep = np.ones(len(counts), dtype=bool)
    for index in range(len(counts)):
        spelling = text.join(candidates.token_ids(corpus, index))
        rival = best.setdefault(spelling, index)
        if rival != index:
            loser = index if counts[index] <= counts[rival] else rival
            keep[loser] = False
            best[spelling] = rival + index - loser
    if keep.all():
        return candidates
    parents = candidates.parents.copy()
    for index, parent in enumerate(parents.tolist()):
        # Parents come before children, so a dropped parent's own parent is final already.
        if parent >= 0 and not keep[parent]:
            parents[index] = parents[parent]
    new_index = np.cumsum(keep) - 1
    parents = np.where(parents >= 0, new_index[parents], -1)
    return Candidates(
        candidates.positions[keep], candidates.lengths[keep], candidates.counts[keep], parents[keep]
    )
