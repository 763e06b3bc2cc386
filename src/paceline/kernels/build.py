"""Compile the C++ kernels once per machine and load them.

The library is kept in the cache folder under a name made of the sources, the compiler and the processor, so a
change of any of them builds anew. It is compiled to a temporary name and renamed: two processes that build at
once do not harm each other, and an interrupted build leaves nothing that a later start would load.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from paceline.config import default_cache_dir
from paceline.errors import UnsupportedFeatureError

SOURCES = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread")
_COMPILE_TIMEOUT = 300.0  # seconds
# A library stays loaded as long as the process: there is no unloading of code that may be running.
_LOADED: dict[Path, ctypes.CDLL] = {}


def compiler() -> str | None:
    """The C++ compiler to use: `CXX`, else c++, g++ or clang++ on the path; None without one."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    return None


def load_kernels(progress: Callable[[str], None] | None = None) -> ctypes.CDLL:
    """The compiled kernels, built now unless a build for this machine is cached.

    Args:
        progress: called with one line before a compilation, which takes some ten seconds.

    Raises:
        UnsupportedFeatureError: no compiler, or it failed.
    """
    path = cache_folder() / f"kernels-{_build_key()}.so"
    if not path.exists():
        if progress is not None:
            progress("compiling the kernels for this processor, once (about 10 s)")
        _compile(path)
    return _loaded(path)


def loaded_kernels() -> ctypes.CDLL | None:
    """The kernels, when this process has loaded them already; nothing is compiled for the asking."""
    return next(iter(_LOADED.values()), None)


def _loaded(path: Path) -> ctypes.CDLL:
    """The library, loaded once per process."""
    if path not in _LOADED:
        try:
            _LOADED[path] = ctypes.CDLL(str(path))
        except OSError as error:
            raise UnsupportedFeatureError(f"the compiled kernels do not load: {error}") from error
    return _LOADED[path]


def cache_folder() -> Path:
    """Where built kernels lie, beside the converted targets."""
    return default_cache_dir() / "kernels"


def _build_key() -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCES.glob("*.[ch]pp")):
        digest.update(path.name.encode() + path.read_bytes())
    found = compiler()
    if found is not None:
        digest.update(_compiler_version(found).encode())
    digest.update(" ".join((*FLAGS, platform.machine(), processor())).encode())
    return digest.hexdigest()[:16]


@cache
def _compiler_version(path: str) -> str:
    return subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout


def processor() -> str:
    """What tells processors with different instructions apart."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "model name", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _compile(path: Path) -> None:
    """Run the compiler into `path`."""
    found = compiler()
    if found is None:
        raise UnsupportedFeatureError(
            "no C++ compiler is on the path: install g++ or clang++ (or set CXX), or use --execution eager"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(dir=path.parent)
    except OSError as error:
        raise UnsupportedFeatureError(
            f"the compiled kernels cannot be kept in {path.parent} ({error.strerror}): set "
            "PACELINE_CACHE_DIR to a folder that can be written"
        ) from error
    try:
        built = Path(folder) / path.name
        command = [found, *FLAGS, "-o", str(built), *map(str, sorted(SOURCES.glob("*.cpp")))]
        try:
            run = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=_COMPILE_TIMEOUT
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UnsupportedFeatureError(f"{found} did not finish: {error}") from error
        if run.returncode:
            lines = [line for line in run.stderr.splitlines() if "error" in line] or ["no message"]
            raise UnsupportedFeatureError(f"{found} cannot compile the kernels: {lines[0].strip()}")
        os.replace(built, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
