"""Where and with what a benchmark ran."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("paceline", "torch", "transformers", "tokenizers", "numpy")
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8")


def package_versions(names: tuple[str, ...] = PACKAGES) -> dict[str, str | None]:
    """Installed versions; None for packages that are not there."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def cpu_model(cpu_file: Path = Path("/proc/cpuinfo")) -> str:
    """Name of the processor."""
    return _cpu_field("model name", cpu_file) or platform.processor() or platform.machine()


def cpu_features(cpu_file: Path = Path("/proc/cpuinfo")) -> dict[str, bool]:
    """Instruction sets that decide how fast matrix products are; empty where the system does not tell."""
    flags = (_cpu_field("flags", cpu_file) or _cpu_field("Features", cpu_file)).split()
    return {flag: flag in flags for flag in _CPU_FLAGS} if flags else {}


def machine() -> dict[str, Any]:
    """The processor and how it is used."""
    import torch

    return {
        "cpu": cpu_model(),
        "cpu_features": [name for name, is_there in cpu_features().items() if is_there],
        "system": platform.platform(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def run_metadata(command: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that a reader needs to judge or repeat a run."""
    return {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_revision": git_revision(),
        "python": platform.python_version(),
        "versions": package_versions(),
        "machine": machine(),
        "settings": dict(settings),
    }


def git_revision(folder: Path = Path(__file__).parent) -> str | None:
    """Commit of the source tree, with `+` when it was changed since; None outside a repository."""
    revision = _git(folder, "rev-parse", "--short=12", "HEAD")
    if not revision:
        return None
    return revision + (
        "+" if _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".") else ""
    )


def _git(folder: Path, *words: str) -> str:
    """Output of a git command, empty when it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu_field(name: str, cpu_file: Path) -> str:
    """First value of a field of the processor's description."""
    try:
        lines = cpu_file.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
