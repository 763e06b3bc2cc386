"""Tokens that are impossible at a tree node: repeated n-grams, bad words, an end that comes too early."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from paceline.engine.node_paths import GrowingIds, NodeSuffixes
from paceline.sequence import Sequence
from paceline.tree import DraftTree

BANNED = float("-inf")


class NoRepeatNgram:
    """Bans tokens that would complete an n-gram that prompt, output or path already hold.

    Args:
        size: n of the n-grams.
        token_ids: committed tokens.
        device: where the logits are.
    """

    def __init__(self, size: int, token_ids: Seq[int], device: torch.device) -> None:
        self._size = size
        self._history = GrowingIds(token_ids, device)

    def apply(self, logits: Tensor, tree: DraftTree, sequence: Sequence) -> None:
        """Compare the end of each node's text with every n-gram before it."""
        size = self._size
        suffixes = NodeSuffixes.of(tree, sequence, size - 1, logits.device)
        last_ids = suffixes.last_ids  # [N + 1, n - 1]
        history = self._history.ids
        if history.shape[0] >= size:
            committed = history.unfold(0, size, 1)[None]  # [1, T - n + 1, n]
            _ban(logits, committed, _is_prefix(committed, last_ids))
        if len(tree) > 1:
            on_path = suffixes.path_ids.unfold(1, size, 1)  # [N + 1, K, n]: windows that end inside the path
            _ban(logits, on_path, _is_prefix(on_path, last_ids) & (on_path[..., -1] >= 0))

    def extend(self, ids: Seq[int]) -> None:
        """Add emitted tokens to the history."""
        self._history.append(ids)


def _is_prefix(windows: Tensor, last_ids: Tensor) -> Tensor:
    """Whether windows [*, W, n] start with each node's last n - 1 tokens: bool [N + 1, W]."""
    matches = torch.ones(last_ids.shape[0], windows.shape[1], dtype=torch.bool, device=last_ids.device)
    for place in range(last_ids.shape[1]):
        matches &= windows[..., place] == last_ids[:, place, None]
    return matches


def _ban(logits: Tensor, windows: Tensor, matches: Tensor) -> None:
    """Ban the last token of the windows that match; the others add zero, so nothing waits for the device."""
    amounts = torch.zeros_like(matches, dtype=logits.dtype).masked_fill_(matches, BANNED)
    logits.scatter_add_(1, windows[..., -1].clamp(min=0).expand_as(matches), amounts)


class BadWords:
    """Bans the last token of forbidden id sequences where the tokens before it are in place.

    Args:
        words: non-empty id sequences.
        device: where the logits are.
    """

    def __init__(self, words: Iterable[Seq[int]], device: torch.device) -> None:
        by_length: dict[int, list[Seq[int]]] = {}
        for word in words:
            by_length.setdefault(len(word), []).append(word)
        single = [word[0] for word in by_length.pop(1, [])]
        self._single_ids = torch.tensor(single, dtype=torch.int64, device=device)
        self._longer = [torch.tensor(group, dtype=torch.int64, device=device) for group in by_length.values()]

    def apply(self, logits: Tensor, tree: DraftTree, sequence: Sequence) -> None:
        """Compare the end of each node's text with the beginnings of the words."""
        logits.index_fill_(1, self._single_ids, BANNED)
        for words in self._longer:  # [W, n]
            suffixes = NodeSuffixes.of(tree, sequence, words.shape[1] - 1, logits.device)
            matches = (suffixes.last_ids[:, None] == words[:, :-1]).all(dim=2)  # [N + 1, W]
            _ban(logits, words[None], matches)

    def extend(self, ids: Seq[int]) -> None:
        """The sequence itself has all that is needed."""


class MinNewTokens:
    """Bans end-of-sequence ids at nodes that come too early, each judged by its own position.

    Args:
        min_new_tokens: fewest tokens before an end.
        eos_token_ids: ids that end the text.
        device: where the logits are.
    """

    def __init__(self, min_new_tokens: int, eos_token_ids: Iterable[int], device: torch.device) -> None:
        self._min_new_tokens = min_new_tokens
        self._eos_ids = torch.tensor(sorted(eos_token_ids), dtype=torch.int64, device=device)

    def apply(self, logits: Tensor, tree: DraftTree, sequence: Sequence) -> None:
        """Ban the ends where the text up to the node is too short."""
        missing = self._min_new_tokens - len(sequence.output_ids)
        if missing <= 0:
            return
        is_early = (tree.depths < missing)[:, None].to(logits.device)
        ends = logits.index_select(1, self._eos_ids).masked_fill(is_early, BANNED)
        logits.index_copy_(1, self._eos_ids, ends)

    def extend(self, ids: Seq[int]) -> None:
        """The sequence itself has all that is needed."""
