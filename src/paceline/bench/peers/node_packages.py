"""Where node and node-llama-cpp are, and how to get them.

The package is installed into the cache folder by npm, without running its scripts, which would compile
llama.cpp where they find no binary. On Linux only the binary for the processor is asked for; those for
graphics cards, which are large, stay away.
"""

from __future__ import annotations

import json
import platform
import shutil
import sys
from pathlib import Path

from paceline.config import default_cache_dir
from paceline.errors import MissingDependencyError

PACKAGE = "node-llama-cpp"
VERSION = "3.22.1"
_BINARIES = {("linux", "x86_64"): "linux-x64", ("linux", "aarch64"): "linux-arm64"}


def packages_folder() -> Path:
    """Where npm's packages are kept."""
    return default_cache_dir() / "peers"


def install_command(folder: Path | None = None) -> str:
    """What to type to install the package."""
    binary = _BINARIES.get((sys.platform, platform.machine()))
    wanted = f"{PACKAGE}@{VERSION}"
    if binary is not None:
        wanted = f"--omit=optional {wanted} @{PACKAGE}/{binary}@{VERSION}"
    return f'npm install --prefix "{folder or packages_folder()}" --ignore-scripts {wanted}'


def find_node() -> str:
    """Path of the program.

    Raises:
        MissingDependencyError: it is not on the path.
    """
    found = shutil.which("node")
    if found is None:
        raise MissingDependencyError(
            "peer 'llama.cpp' runs in Node.js, and there is no program `node`: install Node.js 20 or newer, "
            f"then run `{install_command()}`"
        )
    return found


def check_package(folder: Path) -> None:
    """Raise MissingDependencyError unless the pinned version of node-llama-cpp is in `folder`."""
    described = folder / "node_modules" / PACKAGE / "package.json"
    try:
        found = json.loads(described.read_text(encoding="utf-8"))["version"]
    except (OSError, ValueError, KeyError):
        raise MissingDependencyError(
            f"peer 'llama.cpp' needs {PACKAGE} {VERSION}, which is not in {folder}: run "
            f"`{install_command(folder)}`"
        ) from None
    if found != VERSION:
        raise MissingDependencyError(
            f"peer 'llama.cpp' needs {PACKAGE} {VERSION}, and {folder} holds {found}: run "
            f"`{install_command(folder)}`"
        )
