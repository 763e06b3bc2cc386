"""Running a program that a model wrote: in a process of its own, with little of everything.

The process starts in an empty folder with an empty environment, and limits its own processor time, memory,
file size and open files before the program begins; on Linux it leaves the network where the kernel lets it.
That keeps clumsy programs from doing harm. It is no wall against a hostile one, so nothing is run unless the
user asks.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

TIMEOUT_SECONDS = 10.0
MEMORY_BYTES = 2 << 30

# The program is told neither the name of the file nor what is written there when it has run to its end.
_BOOTSTRAP = f"""
import sys
try:
    import resource
    limits = dict(CPU={int(TIMEOUT_SECONDS)}, AS={MEMORY_BYTES}, FSIZE=1 << 20, NOFILE=32, CORE=0)
except ImportError:
    limits = dict()
for name, limit in limits.items():
    kind = getattr(resource, "RLIMIT_" + name)
    hard = resource.getrlimit(kind)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    try:
        resource.setrlimit(kind, (limit, limit))
    except (ValueError, OSError):
        pass
if sys.platform.startswith("linux"):
    import ctypes
    ctypes.CDLL(None).unshare(0x10000000 | 0x40000000)  # CLONE_NEWUSER | CLONE_NEWNET
source_path, end_path, secret = sys.argv[1:]
del sys.argv[1:]
with open(source_path, encoding="utf-8") as file:
    source = file.read()
exec(compile(source, "program", "exec"), {{"__name__": "program"}})
with open(end_path, "w", encoding="utf-8") as file:
    file.write(secret)
"""


def runs_to_its_end(program: str, timeout_seconds: float = TIMEOUT_SECONDS) -> bool:
    """Run Python source; whether its last statement is done in time, without an error.

    A program that leaves early, even with exit status 0, has not run to its end: the tests stand there.

    Args:
        program: source of the whole program.
        timeout_seconds: of wall time; then the process and its children are killed.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        path, end = Path(folder) / "program.py", Path(folder) / "end"
        path.write_text(program, encoding="utf-8")
        secret = secrets.token_hex()
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _BOOTSTRAP, str(path), str(end), secret],
            cwd=folder,
            env={"PATH": os.defpath, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            is_fine = process.wait(timeout_seconds) == 0
            return is_fine and end.is_file() and end.read_text(encoding="utf-8") == secret
        except subprocess.TimeoutExpired:
            return False
        finally:
            # Whatever it started belongs to its session.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
