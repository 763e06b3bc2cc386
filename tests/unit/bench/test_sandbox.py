"""Programs that a model wrote run apart, in time, with little."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from time import monotonic

import pytest

from paceline.bench.sandbox import runs_to_its_end

ON_LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of Linux")


@pytest.mark.parametrize(
    ("program", "is_fine"),
    [
        ("x = 1 + 1\nassert x == 2", True),
        ("assert False", False),
        ("def f(:", False),
        ("import sys\nsys.exit(0)", False),
        ("import os\nos._exit(0)", False),
        ("if __name__ == '__main__':\n    assert False", True),
        ("import sys\nsys.exit(3)", False),
        ("print('out'); import sys; print('err', file=sys.stderr); input", True),
        ("input()", False),
    ],
)
def test_says_whether_a_program_runs_to_its_end(program, is_fine):
    assert runs_to_its_end(program) is is_fine


def test_an_endless_program_is_stopped_with_its_children(tmp_path):
    alive = tmp_path / "alive"
    child = f"import time; time.sleep(3); open({str(alive)!r}, 'w')"
    program = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {child!r}])\nwhile True: pass"
    started = monotonic()
    assert not runs_to_its_end(program, timeout_seconds=1.0)
    assert monotonic() - started < 3
    while monotonic() - started < 4:
        pass
    assert not alive.exists()


def test_neither_environment_nor_folder_are_those_of_the_caller(monkeypatch):
    monkeypatch.setenv("PACELINE_SECRET", "42")
    program = (
        f"import os\nassert 'PACELINE_SECRET' not in os.environ\nassert os.getcwd() != {str(Path.cwd())!r}"
    )
    assert runs_to_its_end(program)


@ON_LINUX
@pytest.mark.parametrize(
    "program",
    [
        "x = bytearray(6 << 30)",
        "open('big', 'wb').write(bytes(4 << 20))",
        "files = [open('/dev/null') for _ in range(100)]",
    ],
    ids=["memory", "file", "files"],
)
def test_memory_files_and_their_size_are_limited(program):
    assert not runs_to_its_end(program)


@ON_LINUX
def test_a_limit_that_is_lower_already_does_not_keep_the_others_from_being_set():
    import resource

    former = resource.getrlimit(resource.RLIMIT_CPU)
    program = "import resource\nassert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 32"
    code = (
        f"import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)); "
        f"from paceline.bench.sandbox import runs_to_its_end; sys.exit(not runs_to_its_end({program!r}))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert resource.getrlimit(resource.RLIMIT_CPU) == former
