"""From recorded answers to training samples: what the head sees, and what it should say.

Row t of an answer pairs the state that produced the newest token with that token, and its target is the
text from output t on: the longest entry that begins there, and the deepest trie node that the text reaches.
Row 0 belongs to the last prompt token, so that every output token, the end of text included, is predicted
once; no row predicts a prompt token.

States stay in the memory-mapped shards; a batch reads only its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.training.loops import loop_start
from paceline.training.shards import Answer, read_shard, shard_paths
from paceline.vocabularies.phrases import PhraseVocabulary
from paceline.vocabularies.trie import TokenTrie, TrieMatch

SHARDS_PER_GROUP = 16


@dataclass(frozen=True)
class Samples:
    """N rows of answers, in order; answers are contiguous.

    Attributes:
        shards: per shard [T, 1 + L, D], memory-mapped; rows of other answers may be among them.
        shard_ids: int64 [N], shard of each row, ascending.
        shard_rows: int64 [N], row within its shard.
        newest_ids: int64 [N], newest token that the drafter knows.
        output_ids: int64 [N], the token that follows it.
        entries: int64 [N], longest entry that begins the target text, or -1.
        nodes: int64 [N], deepest trie node that the target text reaches, or -1.
        followers: int64 [N], longest of the chained phrases that begins behind that longest entry; their
            number for other text; -1 where nothing is known of what follows.
        is_censored: bool [N], not trained on: the text was cut off while it still walked down the trie, or
            its state is unknown, or it lies in a loop that is left out.
        answer_lens: rows of each answer.
        num_empty: answers left out because they have no token.
    """

    shards: tuple[Tensor, ...]
    shard_ids: Tensor
    shard_rows: Tensor
    newest_ids: Tensor
    output_ids: Tensor
    entries: Tensor
    nodes: Tensor
    followers: Tensor
    is_censored: Tensor
    answer_lens: tuple[int, ...]
    num_empty: int

    def __len__(self) -> int:
        """Rows N."""
        return self.newest_ids.shape[0]

    @cached_property
    def trained(self) -> Tensor:
        """int64: rows that have a target and enter the loss."""
        return torch.nonzero((self.nodes >= 0) & (self.entries >= 0) & ~self.is_censored)[:, 0]

    @property
    def num_bytes(self) -> int:
        """Size of all states of these rows."""
        shard = self.shards[0]
        return len(self) * shard[0].numel() * shard.element_size() if len(shard) else 0

    def states(self, rows: Tensor) -> Tensor:
        """[M, 1 + L, D]: states of the given rows, in their order."""
        shard_ids = self.shard_ids[rows]
        gathered = self.shards[0].new_empty(rows.shape[0], *self.shards[0].shape[1:])
        for shard in set(shard_ids.tolist()):
            places = torch.nonzero(shard_ids == shard)[:, 0]
            gathered[places] = self.shards[shard][self.shard_rows[rows[places]]]
        return gathered

    def shuffled(self, generator: torch.Generator) -> Tensor:
        """Trained rows in random order, by groups of shards so that only a few shards are read at a time."""
        order = torch.randperm(len(self.shards), generator=generator)
        group_of = torch.empty_like(order)
        group_of[order] = torch.arange(len(self.shards)) // SHARDS_PER_GROUP
        groups = group_of[self.shard_ids[self.trained]]
        parts = []
        for group in range(int(group_of.max()) + 1):
            rows = self.trained[groups == group]
            parts.append(rows[torch.randperm(rows.shape[0], generator=generator)])
        return torch.cat(parts)


def read_samples(
    folder: Path,
    vocabulary: PhraseVocabulary,
    is_wanted: Callable[[Answer], bool],
    *,
    drop_loops: bool = False,
    num_followers: int = 0,
) -> Samples:
    """Samples of the wanted answers in a folder of shards.

    Args:
        folder: of the shards.
        vocabulary: gives the targets.
        is_wanted: which answers.
        drop_loops: rows behind `loops.loop_start` are censored.
        num_followers: phrases, the first ones, that may follow another; 0 for none.

    Raises:
        ConfigError: no wanted answer has a token.
    """
    builder = _Builder(vocabulary, drop_loops=drop_loops, num_followers=num_followers)
    for path in shard_paths(folder):
        builder.add_shard(list(read_shard(path)), is_wanted)
    return builder.build()


class _Builder:
    """Collects the rows of answers."""

    def __init__(self, vocabulary: PhraseVocabulary, *, drop_loops: bool, num_followers: int) -> None:
        self.drop_loops = drop_loops
        self.trie = vocabulary.trie
        self.followers = TokenTrie(vocabulary.token_ids[:num_followers]) if num_followers else None
        self.shards: list[Tensor] = []
        self.columns: list[tuple[Tensor, ...]] = []
        self.answer_lens: list[int] = []
        self.num_empty = 0
        self.seen: set[str] = set()

    def add_shard(self, answers: list[Answer], is_wanted: Callable[[Answer], bool]) -> None:
        """Add the wanted answers of one shard; all of a shard's answers are views of one tensor."""
        if not answers:
            return
        start = 0
        for answer in answers:
            num_rows = len(answer.output_ids)
            if answer.key not in self.seen and is_wanted(answer):
                self.seen.add(answer.key)
                if num_rows:
                    self._add(answer, torch.arange(start, start + num_rows))
                else:
                    self.num_empty += 1
            start += num_rows
        self.shards.append(_whole([answer.states for answer in answers]))

    def _add(self, answer: Answer, rows: Tensor) -> None:
        """One answer."""
        match = self.trie.match(answer.output_ids)
        num_rows = len(rows)
        depths = torch.where(match.nodes >= 0, self.trie.depths[match.nodes.clamp(min=0)], 0)
        runs_out = torch.arange(num_rows) + depths >= num_rows
        censored = runs_out & (not answer.is_complete)
        if len(answer.prompt_ids) == 1:
            censored[0] = True  # no state came before the only prompt token
        if self.drop_loops:
            censored[loop_start(answer.output_ids.tolist()) :] = True
        shard_ids = torch.full_like(rows, len(self.shards))
        followers = self._follow(answer, match)
        self.columns.append(
            (
                shard_ids,
                rows,
                answer.newest_ids,
                answer.output_ids,
                match.entries,
                match.nodes,
                followers,
                censored,
            )
        )
        self.answer_lens.append(num_rows)

    def _follow(self, answer: Answer, match: TrieMatch) -> Tensor:
        """What follows the longest entry at each row: see `Samples.followers`."""
        num_rows = len(answer.output_ids)
        if self.followers is None:
            return torch.full((num_rows,), -1)
        behind = self.followers.match(answer.output_ids)
        depths = torch.where(behind.nodes >= 0, self.followers.depths[behind.nodes.clamp(min=0)], 0)
        known = torch.where(behind.entries >= 0, behind.entries, self.followers.num_entries)
        known[(torch.arange(num_rows) + depths >= num_rows) & (not answer.is_complete)] = -1
        lengths = self.trie.depths[self.trie.entry_nodes[match.entries.clamp(min=0)]]
        places = torch.arange(num_rows) + lengths
        # Behind the end of a complete answer stands nothing that could be drafted.
        is_inside = (match.entries >= 0) & (places < num_rows)
        return torch.where(is_inside, known[places.clamp(max=num_rows - 1)], -1)

    def build(self) -> Samples:
        """All rows so far."""
        if not self.columns:
            raise ConfigError("no answers to learn from: give more prompts or a higher --num-tokens")
        shard_ids, rows, newest, outputs, entries, nodes, followers, censored = (
            torch.cat(parts) for parts in zip(*self.columns, strict=True)
        )
        return Samples(
            shards=tuple(self.shards),
            shard_ids=shard_ids,
            shard_rows=rows,
            newest_ids=newest,
            output_ids=outputs,
            entries=entries,
            nodes=nodes,
            followers=followers,
            is_censored=censored,
            answer_lens=tuple(self.answer_lens),
            num_empty=self.num_empty,
        )


def _whole(views: list[Tensor]) -> Tensor:
    """The tensor that consecutive views along dim 0 were split from; no copy where they share storage."""
    first = next(view for view in views if view.numel()) if any(view.numel() for view in views) else views[0]
    total = sum(view.shape[0] for view in views)
    shares = all(
        view.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        for view in views
        if view.numel()
    )
    if not shares:
        return torch.cat(views)
    return first.as_strided((total, *first.shape[1:]), first.stride(), first.storage_offset())


def answer_rows(samples: Samples) -> Iterator[range]:
    """Rows of each answer."""
    start = 0
    for length in samples.answer_lens:
        yield range(start, start + length)
        start += length
