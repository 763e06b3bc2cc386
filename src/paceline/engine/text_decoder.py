"""Token ids to text, piece by piece: what is returned never changes later.

Decoding token by token is wrong for three reasons: a character may be spread over several tokens, a token's
text may depend on the token before it (a leading space), and a byte-fallback tokenizer turns a whole run of
byte tokens into replacement characters when any of them is invalid. So a short window of ids is decoded again
and again: a piece of context whose text is already out, then the newest ids. Text that more ids could still
change is held back.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

REPLACEMENT = "\ufffd"


class TextDecoder:
    """Decodes a growing list of ids; joined, the pieces are `tokenizer.decode` of all ids.

    Args:
        tokenizer: a Hugging Face tokenizer, or anything with its `decode`.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._unsettled_ids = _unsettled_ids(tokenizer, skip_special_tokens)
        self._held: list[int] = []
        self._window: list[int] = []
        self._context_len = 0
        self._num_returned = 0

    def push(self, ids: Seq[int]) -> str:
        """Add ids; return the text that is now certain."""
        num_settled = len(ids)
        while num_settled and ids[num_settled - 1] in self._unsettled_ids:
            num_settled -= 1
        if num_settled == 0:
            self._held.extend(ids)
            return ""
        self._window += self._held
        self._window += ids[:num_settled]
        self._held = list(ids[num_settled:])
        text = self._decode(self._window)
        # An unfinished character decodes to replacement characters at the end; complete ones there wait as
        # well.
        certain = text.rstrip(REPLACEMENT)
        piece = certain[self._num_returned :]
        if len(certain) == len(text) and len(text) > self._num_returned:
            self._window = self._window[self._context_len :]
            self._context_len = len(self._window)
            self._num_returned = len(self._decode(self._window))
        else:
            self._num_returned = len(certain)
        return piece

    def finish(self) -> str:
        """The rest of the text; the decoder is used up."""
        self._window += self._held
        self._held = []
        piece = self._decode(self._window)[self._num_returned :]
        self._num_returned += len(piece)
        return piece

    def copy(self) -> TextDecoder:
        """A decoder in the same state; pushing to one leaves the other alone."""
        twin = TextDecoder.__new__(TextDecoder)
        twin.__dict__.update(self.__dict__)
        twin._held, twin._window = list(self._held), list(self._window)
        return twin

    def _decode(self, ids: list[int]) -> str:
        """Text of ids on their own."""
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


def _unsettled_ids(tokenizer: Any, skip_special_tokens: bool) -> frozenset[int]:
    """Ids whose text is open while a run of byte-fallback tokens lasts; none for other tokenizers."""
    convert = getattr(tokenizer, "convert_tokens_to_ids", None)
    if convert is None:
        return frozenset()
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    # Tokenizers without these tokens answer None or the id of their unknown token.
    ids = sorted({i for i in convert(names) if i is not None})
    tokens = tokenizer.convert_ids_to_tokens(ids)
    known = [i for i, token in zip(ids, tokens, strict=True) if token.startswith("<0x")]
    lone = tokenizer.decode(known[-1:], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if lone != REPLACEMENT:
        return frozenset()
    # Skipped special tokens do not end a run: the decoder never sees them.
    skipped = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
    return frozenset(known).union(skipped if skip_special_tokens else [])
