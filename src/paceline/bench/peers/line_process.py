"""A rival in a process of its own: one line of JSON asks, one line of JSON answers."""

from __future__ import annotations

import json
import subprocess
import tempfile
import weakref
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import IO, Any

from paceline.errors import PacelineError

_GRACE_SECONDS = 5.0


class PeerError(PacelineError):
    """A rival's process ended, or answered what is no answer."""


class LineProcess:
    """A long-lived process; it ends with this object, and its input closes when this process ends.

    Args:
        name: of the rival, for messages.
        command: program and arguments.

    Raises:
        PeerError: the program cannot be started.
    """

    def __init__(self, name: str, command: Seq[str]) -> None:
        self._name = name
        # A file takes any amount; a pipe that nobody reads would fill up and stop the process.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (open as long as the process)
        try:
            self._process = subprocess.Popen(
                list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
            )
        except OSError as error:
            raise PeerError(f"peer {name!r} cannot be started: {error.strerror}: {command[0]}") from None
        self._finalizer = weakref.finalize(self, _end, self._process, self._errors)

    def ask(self, question: Mapping[str, Any], wanted: str) -> Any:
        """Send a question and wait for what its answer holds under `wanted`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except ValueError:  # closed, by `close` or after an earlier failure
            raise PeerError(f"the process of peer {self._name!r} has ended: start it anew") from None
        except OSError:  # it has ended: what it wrote last says why
            raise self._failure() from None
        return self.read(wanted)[wanted]

    def read(self, *wanted: str) -> Mapping[str, Any]:
        """Wait for a line.

        Raises:
            PeerError: there is none, or it is no JSON object with these keys.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise self._failure()
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict) or not found.keys() >= set(wanted):
            seen = line[:80].decode(errors="replace").strip()
            raise PeerError(f"peer {self._name!r} wrote {seen!r}: an object with {', '.join(wanted)} was due")
        return found

    def close(self) -> None:
        """End the process."""
        self._finalizer()

    def _failure(self) -> PeerError:
        """Why the process has ended, in its own last words."""
        assert self._process.stdin is not None
        try:
            self._process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        self.close()
        reason = lines[-1].strip() if lines else "it gave no reason"
        return PeerError(f"the process of peer {self._name!r} ended with {code}: {reason}")


def _end(process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
    """Close the input, which ends a well-behaved process, then make sure."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # unsent words to a process that has ended
                continue
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    errors.close()
