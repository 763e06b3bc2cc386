"""Mining phrases from token sequences that the target wrote: which of the candidates become entries.

Every position of a text is labelled with the longest phrase that begins there. Choosing E phrases is then a
coverage problem: phrase s covers the first |s| tokens at every position where it occurs, and covering a token
twice is worth nothing. The k-th token of a phrase is worth `DECAY ** (k - 1)`, since it is accepted only
after those before it. The gain of one more phrase only falls as others are chosen (submodularity), so a
greedy choice with lazily updated gains is both fast and within 1 - 1/e of the best (Nemhauser, Wolsey and
Fisher, 1978).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from paceline.vocabularies.candidates import (
    Candidates,
    Corpus,
    drop_spelling_variants,
    find_candidates,
    read_corpus,
)
from paceline.vocabularies.segmentation import WORD_WEIGHT
from paceline.vocabularies.token_text import TokenText

Criterion = Literal["accepted", "count"]
Progress = Callable[[str], None]


DECAY = 0.7
"""What a token is worth, per token before it in the phrase: the chance that the draft gets that far."""


@dataclass(frozen=True, slots=True)
class MinedPhrase:
    """A chosen phrase.

    Attributes:
        token_ids: the tokens that the target emits for it.
        count: how often they occur in the corpus, inside longer phrases too.
    """

    token_ids: tuple[int, ...]
    count: int


def mine_phrases(
    sequences: Iterable[list[int]],
    text: TokenText,
    *,
    num_entries: int,
    max_words: int,
    max_tokens: int,
    criterion: Criterion,
    eos_token_ids: frozenset[int],
    progress: Progress | None = None,
) -> list[MinedPhrase]:
    """Choose phrases, most valuable first; an end-of-text token is always among them.

    Args:
        sequences: tokens that the target emitted, one list per answer.
        text: bytes of the tokenizer's tokens.
        num_entries: most phrases.
        max_words: most words of a phrase.
        max_tokens: most tokens of a phrase.
        criterion: `accepted` covers the most tokens, `count` takes the most frequent runs.
        eos_token_ids: tokens that end an answer.
        progress: called with a line per stage.
    """
    report = progress or _say_nothing
    corpus = read_corpus(sequences, text, eos_token_ids)
    report(f"read {len(corpus.token_ids):,} tokens")
    # Runs that are rare in a large corpus are not seen again, and would only slow the choice down.
    min_count = max(2, len(corpus.token_ids) // 250_000)
    found = find_candidates(
        corpus, max_weight=max_words * WORD_WEIGHT, max_tokens=max_tokens, min_count=min_count
    )
    candidates = drop_spelling_variants(corpus, found, text)
    report(f"found {len(candidates.counts):,} phrases that occur {min_count} times or more")
    chosen = (
        choose_covering(candidates, num_entries)
        if criterion == "accepted"
        else _most_frequent(candidates, num_entries)
    )
    phrases = [
        MinedPhrase(candidates.token_ids(corpus, index), int(candidates.counts[index])) for index in chosen
    ]
    report(f"chose {len(phrases):,} phrases")
    return _with_ends(phrases, corpus, eos_token_ids, num_entries)


def choose_covering(candidates: Candidates, num_entries: int, decay: float = DECAY) -> list[int]:
    """Greedily choose the candidates that cover the most tokens, most valuable first.

    Args:
        candidates: what to choose from.
        num_entries: most choices.
        decay: how much less a covered token is worth per token before it in the phrase.
    """
    parents = candidates.parents.tolist()
    worth = np.cumsum(decay ** np.arange(int(candidates.lengths.max(initial=1))))[
        candidates.lengths - 1
    ].tolist()
    # Occurrences that no chosen longer phrase takes already.
    free = candidates.counts.tolist()
    is_chosen = [False] * len(free)

    def gain(index: int) -> float:
        above = parents[index]
        while above >= 0 and not is_chosen[above]:
            above = parents[above]
        return float(free[index] * (worth[index] - (worth[above] if above >= 0 else 0.0)))

    heap = [(-free[index] * worth[index], index) for index in range(len(free))]
    heapq.heapify(heap)
    chosen: list[int] = []
    while heap and len(chosen) < num_entries:
        bound, index = heap[0]
        if bound == 0:
            break  # what is left covers nothing new
        current = -gain(index)
        if current > bound:
            if current < 0:
                heapq.heapreplace(heap, (current, index))
            else:
                heapq.heappop(heap)
            continue
        heapq.heappop(heap)
        is_chosen[index] = True
        chosen.append(index)
        above = parents[index]
        while above >= 0:
            free[above] -= free[index]
            if is_chosen[above]:
                break  # what lies above lost these occurrences when this one was chosen
            above = parents[above]
    return chosen


def _say_nothing(line: str) -> None:
    """Progress that nobody asked for."""


def _most_frequent(candidates: Candidates, num_entries: int) -> list[int]:
    order: list[int] = np.argsort(-candidates.counts, kind="stable")[:num_entries].tolist()
    return order


def _with_ends(
    phrases: list[MinedPhrase], corpus: Corpus, eos_token_ids: frozenset[int], num_entries: int
) -> list[MinedPhrase]:
    """Make sure that every end-of-text token is a phrase, in place of the least valuable ones if need be."""
    present = {phrase.token_ids for phrase in phrases}
    missing = [
        MinedPhrase((token_id,), int((corpus.token_ids == token_id).sum()))
        for token_id in sorted(eos_token_ids)
        if (token_id,) not in present
    ]
    return phrases[: max(num_entries - len(missing), 0)] + missing
