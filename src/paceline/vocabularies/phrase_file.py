r"""The file `phrases.json`.

One JSON object, UTF-8, with exactly these keys:

| key | value |
|---|---|
| `format_version` | 1 |
| `max_words` | most words of an entry |
| `eos_token_ids` | tokens that end a text |
| `tokenizer` | object: `fingerprint` (of the ids and bytes of all tokens), `size` (largest id + 1) |
| `entries` | list of `[string, [token ids], count]`, one a line, most valuable first |

An entry's place in the list is the row of the head's output layer that scores it. Strings keep their leading
space; bytes that are not complete characters are written as lone surrogates (`\udc80` to `\udcff`, Python's
`surrogateescape`); an end of text appears as the text of its token.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError

FORMAT_VERSION = 1
_KEYS = {"format_version", "max_words", "eos_token_ids", "tokenizer", "entries"}


@dataclass(frozen=True, slots=True)
class PhraseFile:
    """The checked content of a phrase file; see the module for the keys."""

    max_words: int
    eos_token_ids: tuple[int, ...]
    tokenizer_fingerprint: str
    tokenizer_size: int
    entries: tuple[tuple[str, tuple[int, ...], int], ...]


def write(path: Path, content: PhraseFile) -> None:
    """Write the file in one step: a reader, or a crash, sees the old file or the new one."""
    head = {
        "format_version": FORMAT_VERSION,
        "max_words": content.max_words,
        "eos_token_ids": content.eos_token_ids,
        "tokenizer": {"fingerprint": content.tokenizer_fingerprint, "size": content.tokenizer_size},
    }
    lines = ",\n".join(json.dumps(entry) for entry in content.entries)
    document = json.dumps(head, indent=1).removesuffix("\n}") + ',\n "entries": [\n' + lines + "\n]}\n"
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(document)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read(path: Path) -> PhraseFile:
    """Read and check a phrase file.

    Raises:
        CheckpointError: it is missing, not JSON, or anything in it is not as the format says.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: is not JSON ({error})") from error
    if not isinstance(document, dict) or set(document) != _KEYS:
        keys = sorted(document) if isinstance(document, dict) else type(document).__name__
        raise CheckpointError(f"{path}: has {keys}, a phrase file has exactly the keys {sorted(_KEYS)}")
    if document["format_version"] != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: format_version is {document['format_version']!r}, this paceline reads {FORMAT_VERSION}"
        )
    tokenizer = document["tokenizer"]
    if not isinstance(tokenizer, dict) or set(tokenizer) != {"fingerprint", "size"}:
        raise CheckpointError(
            f"{path}: tokenizer is {tokenizer!r}, it must have the keys fingerprint and size"
        )
    size = tokenizer["size"]
    if not _is_count(size) or not isinstance(tokenizer["fingerprint"], str):
        raise CheckpointError(
            f"{path}: tokenizer is {tokenizer!r}: fingerprint must be a string, size a number"
        )
    if not _is_count(document["max_words"]) or document["max_words"] < 1:
        raise CheckpointError(f"{path}: max_words is {document['max_words']!r}, it must be a positive number")
    if not isinstance(document["entries"], list) or not document["entries"]:
        raise CheckpointError(f"{path}: entries must be a list with at least one phrase")
    return PhraseFile(
        max_words=document["max_words"],
        eos_token_ids=_ids(path, "eos_token_ids", document["eos_token_ids"], size),
        tokenizer_fingerprint=tokenizer["fingerprint"],
        tokenizer_size=size,
        entries=tuple(_entry(path, number, entry, size) for number, entry in enumerate(document["entries"])),
    )


def _entry(path: Path, number: int, entry: Any, size: int) -> tuple[str, tuple[int, ...], int]:
    if (
        not isinstance(entry, list)
        or len(entry) != 3
        or not isinstance(entry[0], str)
        or not _is_count(entry[2])
    ):
        raise CheckpointError(f"{path}: entry {number} is {entry!r}, it must be [string, [token ids], count]")
    ids = _ids(path, f"entry {number}", entry[1], size)
    if not ids:
        raise CheckpointError(f"{path}: entry {number} ({entry[0]!r}) has no tokens, it needs at least one")
    return entry[0], ids, entry[2]


def _ids(path: Path, what: str, value: Any, size: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(_is_count(token_id) for token_id in value):
        raise CheckpointError(f"{path}: {what} is {value!r}, it must hold a list of token ids")
    if any(token_id >= size for token_id in value):
        raise CheckpointError(
            f"{path}: {what} has token id {max(value)}, the tokenizer has ids 0 to {size - 1}"
        )
    return tuple(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
