"""Running a program that a model wrote: in a process of its own, with little of everything.

The process starts in an empty folder with an empty environment, and limits its own processor time, memory,
file size and open files before the program begins; on Linux it leaves the network where the kernel lets it.
That keeps clumsy programs from doing harm. It is no wall against a hostile one, so nothing is run unless the
user asks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

TIMEOUT_SECONDS = 10.0
MEMORY_BYTES = 2 << 30

_BOOTSTRAP = f"""
import sys
try:
    import resource
    limits = [
        (resource.RLIMIT_CPU, {int(TIMEOUT_SECONDS)}), (resource.RLIMIT_AS, {MEMORY_BYTES}),
        (resource.RLIMIT_FSIZE, 1 << 20), (resource.RLIMIT_NOFILE, 32), (resource.RLIMIT_CORE, 0),
    ]
    for kind, limit in limits:
        resource.setrlimit(kind, (limit, limit))
except (ImportError, ValueError, OSError):
    pass
if sys.platform.startswith("linux"):
    import ctypes
    ctypes.CDLL(None).unshare(0x10000000 | 0x40000000)  # CLONE_NEWUSER | CLONE_NEWNET
with open(sys.argv[1], encoding="utf-8") as file:
    source = file.read()
exec(compile(source, "program", "exec"), {{"__name__": "__main__"}})
"""


def runs_without_error(program: str, timeout_seconds: float = TIMEOUT_SECONDS) -> bool:
    """Run Python source; whether it ends by itself, in time, with exit status 0.

    Args:
        program: source of the whole program.
        timeout_seconds: of wall time; then the process and its children are killed.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        path = Path(folder) / "program.py"
        path.write_text(program, encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _BOOTSTRAP, str(path)],
            cwd=folder,
            env={"PATH": os.defpath, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(timeout_seconds) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            # Whatever it started belongs to its session.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
