"""The fast tokenizer that a GGUF file describes, built straight from its token and merge lists.

Two kinds are built here: byte-level BPE split as GPT-2 does (SmolLM2) and the SentencePiece BPE of Gemma,
whose merges are recovered from the order of the vocabulary. The result equals, part by part, the tokenizer
that transformers rebuilds from the same file in ten times the time. For every other kind `build_tokenizer`
answers None and transformers' own conversion is used.

Read `save_tokenizer` first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.targets.gguf_file import GgufFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types
_GPT2_SPLITS = ("smollm", "gpt-2", "default")
# What a chat template may end a turn with, where the file names only the end of a text.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")
_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def save_tokenizer(file: GgufFile, folder: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and the chat template of a GGUF file."""
    backend = build_tokenizer(file.metadata)
    if backend is None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
        tokenizer.save_pretrained(str(folder))
    else:
        backend.save(str(folder / "tokenizer.json"))
        tokens: Seq[str] = file.metadata["tokenizer.ggml.tokens"]
        roles = {
            role: tokens[file.metadata[f"tokenizer.ggml.{key}"]]
            for role, key in _ROLES.items()
            if f"tokenizer.ggml.{key}" in file.metadata
        }
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **roles}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def eos_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Ids that end a generation: end of text, end of turn, and the end of turn its chat template writes."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    template: str = metadata.get("tokenizer.chat_template", "")
    written = [name for name in _END_OF_TURN if name in template]
    if written:
        tokens: Seq[str] = metadata.get("tokenizer.ggml.tokens", [])
        found += [tokens.index(name) for name in written if name in tokens]
    return sorted({token_id for token_id in found if token_id is not None})


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer | None:
    """The `tokenizers` object of the vocabulary in a GGUF header; None for a kind that is not known here."""
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind == "gpt2" and split in _GPT2_SPLITS and "tokenizer.ggml.merges" in metadata:
        tokenizer = _byte_level(metadata)
    elif kind == "llama" and metadata.get("general.architecture") == "gemma3":
        tokenizer = _gemma(metadata)
    else:
        return None
    _add_whole_tokens(tokenizer, metadata)
    _add_edges(tokenizer, metadata)
    return tokenizer


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    tokens: Seq[str] = metadata["tokenizer.ggml.tokens"]
    # Tokens written in other characters are spelled in the byte alphabet, as all the others already are.
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    vocab = {
        token if alphabet.issuperset(token) else "".join(piece for piece, _ in spell(token)): token_id
        for token_id, token in enumerate(tokens)
    }
    merges = [_pair(merge) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab, merges, continuing_subword_prefix="", end_of_word_suffix=""))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _gemma(metadata: Mapping[str, Any]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    stored: Seq[str] = metadata["tokenizer.ggml.tokens"]
    # Runs of spaces are stored as spaces, while the normalizer turns every space of a text into U+2581.
    tokens = ["\u2581" * len(token) if token and not token.strip(" ") else token for token in stored]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    unknown = stored[metadata.get("tokenizer.ggml.unknown_token_id", 3)]
    tokenizer = Tokenizer(
        BPE(vocab, list(_implied_merges(vocab)), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _implied_merges(vocab: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Every cut of a token into two tokens; earlier tokens first, then the longer left part."""
    for token in vocab:
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                yield left, right


def _add_whole_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Control and user-defined tokens are matched whole in a text, never cut into pieces."""
    from tokenizers import AddedToken

    types: Seq[int] = metadata.get("tokenizer.ggml.token_type", [])
    typed = list(zip(metadata["tokenizer.ggml.tokens"], types))
    known = {token for token, kind in typed if kind in (_CONTROL, _USER_DEFINED) and _has(tokenizer, token)}
    tokenizer.add_special_tokens(
        [
            AddedToken(t, normalized=False, special=True)
            for t, kind in typed
            if kind == _CONTROL and t in known
        ]
    )
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False) for t, kind in typed if kind == _USER_DEFINED and t in known]
    )


def _has(tokenizer: Tokenizer, token: str) -> bool:
    return tokenizer.token_to_id(token) is not None


def _add_edges(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Write the begin and end tokens around a text where the file asks for them."""
    from tokenizers.processors import TemplateProcessing

    tokens: Seq[str] = metadata["tokenizer.ggml.tokens"]
    sentence_piece = (
        metadata["tokenizer.ggml.model"] == "llama"
    )  # these begin every text unless told otherwise
    edges: dict[str, tuple[str, int]] = {}
    for edge, default in (("bos", sentence_piece), ("eos", False)):
        token_id = metadata.get(f"tokenizer.ggml.{edge}_token_id")
        if metadata.get(f"tokenizer.ggml.add_{edge}_token", default) and token_id is not None:
            edges[edge] = (tokens[token_id], token_id)
    begin, end = ([edges[edge][0]] if edge in edges else [] for edge in ("bos", "eos"))
    tokenizer.post_processor = TemplateProcessing(
        single=[*begin, "$A:0", *end],
        pair=[
            *begin,
            "$A:0",
            *end,
            *(f"{token}:1" for token in begin),
            "$B:1",
            *(f"{token}:1" for token in end),
        ],
        special_tokens=list(edges.values()),
    )
