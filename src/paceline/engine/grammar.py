"""Grammars on draft trees: the tokens that may follow each node, whatever was drafted.

llguidance follows one text token by token and says, as a bit mask, which tokens may come next. Here it walks
each draft tree depth-first: forward along an edge by consuming its token, back by rolling it back, so that a
node costs one step and one mask wherever it hangs. After the walk it stands at the committed text again.

Ends of the text are kept apart from llguidance: it knows one token of its own, outside the tokenizer, that
says "complete here", and its bit is what the bits of the sequence's end-of-sequence ids become.
"""

from __future__ import annotations

import string
from collections.abc import Sequence as Seq
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import RequestError, UnsupportedFeatureError
from paceline.grammar import Grammar, grammar_library, short_reason
from paceline.sequence import Sequence
from paceline.transfers import upload
from paceline.tree import DraftTree

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_BANNED = float("-inf")
_END_TOKEN = "<|end of grammar|>"
_STUCK = "NoExtension"
_WORD_BITS = 32


class GrammarTokenizer:
    """What llguidance has to know of a tokenizer: built with the first grammar, which takes a moment.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        vocab_size: V, entries of the target's logits.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size

    @cached_property
    def _built(self) -> LLTokenizer:
        from tokenizers import AddedToken, Tokenizer

        library = grammar_library()
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UnsupportedFeatureError(
                f"structured output needs a fast tokenizer, this one is a {type(self._tokenizer).__name__}"
            )
        copy = Tokenizer.from_str(backend.to_str())
        copy.no_padding()
        copy.no_truncation()
        copy.add_special_tokens([AddedToken(_END_TOKEN, special=True)])
        size = max(self.vocab_size, copy.get_vocab_size())
        try:
            built: LLTokenizer = library.LLTokenizer(
                copy.to_str(), n_vocab=size, eos_token=copy.token_to_id(_END_TOKEN)
            )
        except ValueError as error:
            raise UnsupportedFeatureError(
                f"structured output cannot use this tokenizer: {short_reason(str(error))}"
            ) from error
        pieces = {built.decode_bytes([i]) for i in range(copy.get_vocab_size())}
        missing = next((c for c in string.printable.strip() if c.encode() not in pieces), None)
        if missing is not None:
            # llguidance takes for granted that whatever a grammar forces can be spelled.
            raise UnsupportedFeatureError(
                "structured output needs a tokenizer with a token for every printable ASCII character, "
                f"this one has none for {missing!r}"
            )
        return built

    def prepare(self) -> None:
        """Build it now.

        Raises:
            MissingDependencyError: llguidance is not installed.
            UnsupportedFeatureError: it cannot use this tokenizer.
        """
        _ = self._built

    @property
    def end_id(self) -> int:
        """The token that stands for a complete text; the target has no such token."""
        return self._built.eos_token

    @property
    def num_words(self) -> int:
        """Words of 32 bits in a mask."""
        return -(-self._built.vocab_size // _WORD_BITS)

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """A matcher in front of the first token; RequestError where this vocabulary rules the grammar out."""
        library = grammar_library()
        limits = library.LLParserLimits(verbose_errors=False)
        matcher: LLMatcher = library.LLMatcher(self._built, grammar.source, log_level=0, limits=limits)
        if matcher.is_error():
            raise RequestError(
                f"the {grammar.kind} cannot be used with this model: {short_reason(matcher.get_error())}"
            )
        return matcher

    def bits(self, token_ids: Seq[int]) -> NDArray[np.int32]:
        """Mask int32 [W] with the bits of some tokens."""
        flags = np.zeros(self.num_words * _WORD_BITS, dtype=np.uint8)
        flags[list(token_ids)] = 1
        return np.packbits(flags, bitorder="little").view(np.int32)


class GrammarProcessor:
    """Bans, at every node, the tokens with which no text of the grammar goes on. It must act last.

    Once the text is complete only end-of-sequence ids are left. Where the request's own bans leave nothing of
    what the grammar allows (a minimum length behind a complete text, a bad word that the schema spells), the
    grammar wins: what it allows becomes possible again, each token as likely as the others.

    Args:
        grammar: what the answer may be.
        tokenizer: of the target.
        sequence: whose output it is.
        has_bans: whether processors before this one ban tokens.

    Raises:
        RequestError: the sequence never ends, or the grammar allows no first token.
    """

    def __init__(
        self, grammar: Grammar, tokenizer: GrammarTokenizer, sequence: Sequence, *, has_bans: bool
    ) -> None:
        eos_token_ids = sequence.eos_token_ids
        if sequence.parameters.ignore_eos or not eos_token_ids:
            seen = "ignore_eos is true" if sequence.parameters.ignore_eos else "it has no end-of-sequence id"
            raise RequestError(f"a request with a grammar must be able to end, but {seen}")
        bad = next((i for i in eos_token_ids if not 0 <= i < tokenizer.vocab_size), None)
        if bad is not None:
            raise RequestError(
                f"eos_token_ids has token id {bad}: ids of this target are 0 to {tokenizer.vocab_size - 1}"
            )
        self._grammar = grammar
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._has_bans = has_bans
        self._matcher = tokenizer.matcher(grammar)
        self._consumed: list[int] = []
        self._is_over = False
        self._dead_ends: dict[tuple[int, ...], str] = {}  # of the last tree: texts, and what is wrong
        self._dead_end: str | None = None
        self._end_id, self._num_words = tokenizer.end_id, tokenizer.num_words
        self._eos_bits = tokenizer.bits(sorted(eos_token_ids))
        # An end of the text is never a piece of it, even if the grammar could spell it.
        self._text_bits = ~(self._eos_bits | tokenizer.bits([self._end_id]))
        self._masks(DraftTree.root_only(0))
        self.extend(sequence.output_ids)

    def apply(self, logits: Tensor, tree: DraftTree, sequence: Sequence) -> None:  # noqa: ARG002
        """Ban what may not follow each node.

        Raises:
            RequestError: the grammar became too complex to follow, or allows nothing that this vocabulary
                can spell.
        """
        masks = self._masks(tree)
        flags = np.unpackbits((~masks).view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[1]]
        forbidden = upload(torch.from_numpy(flags.view(np.bool_)), logits.device)  # [N + 1, V]
        logits.masked_fill_(forbidden, _BANNED)
        if self._has_bans:
            is_empty = logits.amax(dim=1, keepdim=True) == _BANNED
            logits.masked_fill_(is_empty & ~forbidden, 0.0)

    def extend(self, ids: Seq[int]) -> None:
        """Follow committed tokens; an end-of-sequence id is the last of them."""
        for token_id in ids:
            if self._is_over or token_id in self._eos_token_ids:
                self._is_over = True
                return
            self._consumed.append(token_id)
            # A failure stays with the matcher and is raised by the next `apply`, when nothing is half done.
            self._matcher.consume_token(token_id)
        for text, reason in self._dead_ends.items():
            if tuple(self._consumed[: len(text)]) == text:
                self._dead_end = reason

    def _masks(self, tree: DraftTree) -> NDArray[np.int32]:
        """Bits of the tokens that may follow each node: int32 [N + 1, W].

        Everything may follow a node that no text reaches: its own token is illegal, or it is below such a
        node or below the end of the text. The mask of the node above rules it out already, no verifier keeps
        it, and so its row is neither computed nor read.
        """
        masks = np.full((len(tree), self._num_words), -1, dtype=np.int32)
        self._fill(masks[0])
        if self._dead_end is None and self._matcher.is_error():
            self._dead_end = self._matcher.get_error()
        if self._dead_end is not None:
            raise self._failure(self._dead_end)
        self._dead_ends = {}
        walked = [0, *self._walk(tree, masks)] if len(tree) > 1 else [0]
        rows = masks[walked]
        is_complete = (rows[:, self._end_id // _WORD_BITS] >> (self._end_id % _WORD_BITS)) & 1
        rows &= self._text_bits
        rows |= np.where(is_complete[:, None], self._eos_bits, 0)
        masks[walked] = rows
        stuck = np.flatnonzero(~rows.any(axis=1)).tolist()
        if stuck and stuck[0] == 0:
            raise self._failure(_STUCK)
        for place in stuck:
            self._close(tree, masks, walked[place], _STUCK)
        return masks

    def _walk(self, tree: DraftTree, masks: NDArray[np.int32]) -> list[int]:
        """Fill the masks of the drafted nodes that some text reaches; returns those nodes."""
        token_ids, parents = tree.token_ids.tolist(), tree.parents.tolist()
        children: list[list[int]] = [[] for _ in token_ids]
        for node, parent in enumerate(parents[1:], start=1):
            children[parent].append(node)
        walked: list[int] = []
        path: list[int] = []  # tokens between the root and where the matcher stands
        waiting = [(node, 0) for node in reversed(children[0])]
        while waiting:
            node, depth_above = waiting.pop()
            if len(path) > depth_above:
                self._matcher.rollback(len(path) - depth_above)
                del path[depth_above:]
            token_id = token_ids[node]
            if token_id in self._eos_token_ids:
                continue
            if self._matcher.try_consume_tokens([token_id]) == 1:
                path.append(token_id)
                self._fill(masks[node])
                if not self._matcher.is_error():
                    walked.append(node)
                    waiting += [(child, len(path)) for child in reversed(children[node])]
            elif _has_bit(masks[parents[node]], token_id) and not self._matcher.is_error():
                # Where a vocabulary lacks bytes that a grammar forces, masks allow what is then not taken.
                self._close(tree, masks, node, _STUCK)
            if self._matcher.is_error():
                self._close(tree, masks, node, self._matcher.get_error())
                self._start_over(path)
        if path:
            self._matcher.rollback(len(path))
        return walked

    def _close(self, tree: DraftTree, masks: NDArray[np.int32], node: int, reason: str) -> None:
        """Note a drafted node behind which the grammar cannot be followed.

        Plain decoding would fail only on arriving there, so this must not fail here. One more token may come,
        whichever, but neither a drafted one nor an end; the next round then fails as plain decoding does.
        """
        children = tree.token_ids[tree.parents == node].tolist()
        masks[node] = ~self._tokenizer.bits([*self._eos_token_ids, *children])
        path = tree.path_table[node, 1 : int(tree.depths[node]) + 1]
        self._dead_ends[*self._consumed, *tree.token_ids[path].tolist()] = reason

    def _fill(self, mask: NDArray[np.int32]) -> None:
        """Write the matcher's own mask into one row [W]."""
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    def _start_over(self, path: list[int]) -> None:
        """A new matcher at the end of a path: errors are for ever."""
        self._matcher = self._tokenizer.matcher(self._grammar)
        self._matcher.consume_tokens([*self._consumed, *path])

    def _failure(self, reason: str) -> RequestError:
        """The error of a text that cannot go on."""
        # NoExtensionBias and its like: a text has begun that cannot be completed.
        is_stuck = reason.startswith(_STUCK)
        what = "no token of this model goes on with the text" if is_stuck else short_reason(reason)
        return RequestError(
            f"the {self._grammar.kind} cannot be followed after {len(self._consumed)} tokens: {what}; "
            "use a simpler one, or one whose texts this model can spell"
        )


def _has_bit(mask: NDArray[np.int32], token_id: int) -> bool:
    """Whether a mask [W] allows a token."""
    return bool(mask[token_id // _WORD_BITS] >> (token_id % _WORD_BITS) & 1)
