"""A draft vocabulary of phrases: strings of one to three words that expand to the target's own tokens.

An entry is mined from text that the target itself wrote: a string, and the tokens that the target emitted for
it. Labels are found by walking those tokens through a trie, never by tokenising again, so a label is always a
true prefix of what follows.

The end of a text is an entry as well (and may end other entries), so that the last token of an answer can be
drafted. Bytes that are not complete characters are kept as lone surrogates in the strings (Python's
`surrogateescape`).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.errors import CheckpointError, ConfigError
from paceline.vocabularies import phrase_file
from paceline.vocabularies.mining import Criterion, Progress, mine_phrases
from paceline.vocabularies.retargeting import expand_in_context
from paceline.vocabularies.token_text import text_of, token_text
from paceline.vocabularies.trie import TokenTrie

MAX_WORDS_LIMIT = 5
_TOKENS_PER_WORD = 4


@dataclass(frozen=True)
class PhraseVocabulary:
    """E phrases and their expansion for one tokenizer.

    Attributes:
        texts: strings of the entries, all distinct, leading spaces kept, most valuable first.
        token_ids: tokens of each entry for the tokenizer `tokenizer_fingerprint`.
        counts: occurrences of each entry in the mined text.
        max_words: most words of an entry.
        eos_token_ids: tokens that end a text; they are the last token of an entry or in none.
        tokenizer_fingerprint: identifies the tokenizer (`TokenText.fingerprint`).
        tokenizer_size: one more than its largest token id.
    """

    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]
    max_words: int
    eos_token_ids: tuple[int, ...]
    tokenizer_fingerprint: str
    tokenizer_size: int

    def __len__(self) -> int:
        """Number of entries E."""
        return len(self.texts)

    @cached_property
    def trie(self) -> TokenTrie:
        """All entries merged."""
        return TokenTrie(self.token_ids)

    def entry_token_ids(self, entry: int) -> tuple[int, ...]:
        """Tokens of an entry."""
        return self.token_ids[entry]

    def entry_text(self, entry: int) -> str:
        """String of an entry."""
        return self.texts[entry]

    def label(self, token_ids: Tensor | Seq[int]) -> Tensor:
        """Longest entry that begins at each position: int64 [T] -> int64 [T], -1 where none does.

        The label at t is a prefix of `token_ids[t:]`: it is what the hidden state of token t - 1 should
        predict. Where a text was cut off, its last labels are shorter than the target would have gone on.
        """
        return self.trie.match(token_ids).entries

    def deepest_node(self, token_ids: Tensor | Seq[int]) -> Tensor:
        """Deepest trie node that the text reaches from each position: int64 [T] -> int64 [T], or -1."""
        return self.trie.match(token_ids).nodes

    @classmethod
    def mine(
        cls,
        sequences: Iterable[list[int]],
        tokenizer: Any,
        *,
        num_entries: int = 8000,
        max_words: int = 3,
        criterion: Criterion = "accepted",
        eos_token_ids: Iterable[int] | None = None,
        progress: Progress | None = None,
    ) -> PhraseVocabulary:
        """Mine a vocabulary from answers that the target wrote.

        Args:
            sequences: emitted tokens, one list per answer, the end-of-text token included.
            tokenizer: the target's tokenizer.
            num_entries: most entries; a small text gives fewer.
            max_words: most words of an entry, 1 to 5.
            criterion: `accepted` chooses the entries that cover the most tokens, `count` the most frequent.
            eos_token_ids: tokens that end an answer; by default the tokenizer's.
            progress: called with a line per stage.

        Raises:
            ConfigError: an argument is out of range or there is no text.
        """
        if not 1 <= max_words <= MAX_WORDS_LIMIT:
            raise ConfigError(f"max_words is {max_words}: it must be between 1 and {MAX_WORDS_LIMIT}")
        if num_entries < 1:
            raise ConfigError(f"num_entries is {num_entries}: it must be at least 1")
        if criterion not in ("accepted", "count"):
            raise ConfigError(f"criterion is {criterion!r}: it must be 'accepted' or 'count'")
        text = token_text(tokenizer)
        ends = _end_ids(tokenizer, eos_token_ids)
        phrases = mine_phrases(
            sequences,
            text,
            num_entries=num_entries,
            max_words=max_words,
            max_tokens=_TOKENS_PER_WORD * max_words,
            criterion=criterion,
            eos_token_ids=frozenset(ends),
            progress=progress,
        )
        return cls(
            texts=tuple(text_of(text.join(phrase.token_ids)) for phrase in phrases),
            token_ids=tuple(phrase.token_ids for phrase in phrases),
            counts=tuple(phrase.count for phrase in phrases),
            max_words=max_words,
            eos_token_ids=ends,
            tokenizer_fingerprint=text.fingerprint,
            tokenizer_size=len(text),
        )

    def save(self, path: str | Path) -> None:
        """Write `phrases.json` (format: `paceline.vocabularies.phrase_file`) in one step."""
        phrase_file.write(
            Path(path),
            phrase_file.PhraseFile(
                max_words=self.max_words,
                eos_token_ids=self.eos_token_ids,
                tokenizer_fingerprint=self.tokenizer_fingerprint,
                tokenizer_size=self.tokenizer_size,
                entries=tuple(zip(self.texts, self.token_ids, self.counts, strict=True)),
            ),
        )

    @classmethod
    def load(cls, path: str | Path) -> PhraseVocabulary:
        """Read what `save` wrote.

        Raises:
            CheckpointError: the file is missing, damaged or of another kind; the message says how.
        """
        stored = phrase_file.read(Path(path))
        vocabulary = cls(
            texts=tuple(text for text, _, _ in stored.entries),
            token_ids=tuple(ids for _, ids, _ in stored.entries),
            counts=tuple(count for _, _, count in stored.entries),
            max_words=stored.max_words,
            eos_token_ids=stored.eos_token_ids,
            tokenizer_fingerprint=stored.tokenizer_fingerprint,
            tokenizer_size=stored.tokenizer_size,
        )
        if len(set(vocabulary.token_ids)) != len(vocabulary) or len(set(vocabulary.texts)) != len(vocabulary):
            raise CheckpointError(f"{path}: some entries are listed twice; every phrase must be there once")
        ends = set(stored.eos_token_ids)
        past_end = next((text for text, ids, _ in stored.entries if ends.intersection(ids[:-1])), None)
        if past_end is not None:
            raise CheckpointError(f"{path}: entry {past_end!r} runs past an end-of-text token, none may")
        return vocabulary

    def retarget(self, tokenizer: Any, *, eos_token_ids: Iterable[int] | None = None) -> RetargetedVocabulary:
        """Expand the same strings for another tokenizer, as it would write them in the middle of a text.

        Entries that the other tokenizer cannot spell on their own (parts of characters, text that it
        normalises away) are dropped; an end of text becomes the other tokenizer's.

        Args:
            tokenizer: the other tokenizer.
            eos_token_ids: its tokens that end a text; by default the tokenizer's own.
        """
        text = token_text(tokenizer)
        old_ends, new_ends = frozenset(self.eos_token_ids), _end_ids(tokenizer, eos_token_ids)
        expanded: dict[tuple[int, ...], int] = {}
        num_merged = 0
        for entry, ids in enumerate(self.token_ids):
            is_end = ids[-1] in old_ends
            own_text = self._text_without_end(entry) if is_end else self.texts[entry]
            new_ids = expand_in_context(own_text, tokenizer, text) if own_text else ()
            if new_ids is None or (is_end and not new_ends):
                continue
            new_ids += new_ends[:1] if is_end else ()
            if new_ids in expanded:
                num_merged += 1
                continue
            expanded[new_ids] = entry
        kept = tuple(expanded.values())
        vocabulary = PhraseVocabulary(
            texts=tuple(text_of(text.join(ids)) for ids in expanded),
            token_ids=tuple(expanded),
            counts=tuple(self.counts[entry] for entry in kept),
            max_words=self.max_words,
            eos_token_ids=new_ends,
            tokenizer_fingerprint=text.fingerprint,
            tokenizer_size=len(text),
        )
        return RetargetedVocabulary(vocabulary, kept, len(self) - len(kept) - num_merged, num_merged)

    def _text_without_end(self, entry: int) -> str:
        """The string of an entry that ends the text, without the end itself."""
        end = self._end_texts[self.token_ids[entry][-1]]
        return self.texts[entry].removesuffix(end)

    @cached_property
    def _end_texts(self) -> dict[int, str]:
        """String of every end-of-text token; each is an entry of its own."""
        singles = {
            ids[0]: text for ids, text in zip(self.token_ids, self.texts, strict=True) if len(ids) == 1
        }
        return {token_id: singles.get(token_id, "") for token_id in self.eos_token_ids}


@dataclass(frozen=True, slots=True)
class RetargetedVocabulary:
    """The outcome of `PhraseVocabulary.retarget`.

    Attributes:
        vocabulary: the entries that the new tokenizer can spell.
        kept_entries: for each of them, its number in the old vocabulary (to slice a head's rows).
        num_dropped: entries that it cannot spell.
        num_merged: entries that became the same as an earlier one.
    """

    vocabulary: PhraseVocabulary
    kept_entries: tuple[int, ...]
    num_dropped: int
    num_merged: int


def _end_ids(tokenizer: Any, given: Iterable[int] | None) -> tuple[int, ...]:
    """End-of-text ids, sorted: those given, else the tokenizer's own, else none."""
    if given is None:
        own = getattr(tokenizer, "eos_token_id", None)
        given = [] if own is None else [own]
    return tuple(sorted({int(token_id) for token_id in given}))
