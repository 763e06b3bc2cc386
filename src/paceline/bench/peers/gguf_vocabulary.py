"""The vocabulary of a Hugging Face tokenizer as a GGUF file stores it.

A rival is given token ids and gives token ids back, so its tokenizer never cuts a text. What is written is
what a reader of GGUF files needs to accept the file: every id has its token and its kind, and byte-level BPE
has its merges.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from paceline.errors import UnsupportedFeatureError

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # llama.cpp's token types
# llama.cpp insists on a way of splitting texts that it knows; no text is ever split.
SPLIT = "gpt-2"


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """What goes under `tokenizer.ggml`.

    Attributes:
        tokens: one per row of the embedding.
        token_types: llama.cpp's type of each.
        merges: pairs joined by a space, in their order.
        special_ids: key, such as `bos_token_id` -> id.
    """

    tokens: tuple[str, ...]
    token_types: tuple[int, ...]
    merges: tuple[str, ...]
    special_ids: dict[str, int]


def read_vocabulary(tokenizer: Any, num_tokens: int) -> GgufVocabulary:
    """Read a tokenizer.

    Args:
        tokenizer: a fast tokenizer of transformers whose model is BPE.
        num_tokens: rows of the embedding; ids without a token become unused ones.

    Raises:
        UnsupportedFeatureError: a tokenizer of another kind.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    stored = None if backend is None else json.loads(backend.to_str())
    kind = None if stored is None else stored["model"].get("type")
    if stored is None or kind != "BPE":
        raise UnsupportedFeatureError(
            f"tokenizer {type(tokenizer).__name__} ({kind or 'no fast one'}) cannot be written into a GGUF "
            "file: only BPE tokenizers can"
        )
    tokens = [f"[PAD{token_id}]" for token_id in range(num_tokens)]
    types = [UNUSED] * num_tokens
    entries = [(token_id, token, NORMAL) for token, token_id in stored["model"]["vocab"].items()]
    entries += [
        (added["id"], added["content"], CONTROL if added["special"] else USER_DEFINED)
        for added in stored["added_tokens"]
    ]
    for token_id, token, token_type in entries:
        if token_id < num_tokens:  # the model cannot choose any other
            tokens[token_id], types[token_id] = token, token_type
    return GgufVocabulary(
        tuple(tokens), tuple(types), tuple(map(_joined, stored["model"]["merges"])), _special_ids(tokenizer)
    )


def _joined(merge: str | Seq[str]) -> str:
    """A merge as one string; newer tokenizers keep it as a pair."""
    return merge if isinstance(merge, str) else " ".join(merge)


def _special_ids(tokenizer: Any) -> dict[str, int]:
    """Ids of the tokens that begin, end and pad a text, under the names of GGUF."""
    found = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "padding_token_id": tokenizer.pad_token_id,
    }
    return {key: int(token_id) for key, token_id in found.items() if token_id is not None}
