"""The server as a process: signals, a crash and a new start, and what keeps it from starting."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from paceline.testing import tiny_model, tiny_tokenizer

BODY = {"prompt": "the cat and the hat", "max_tokens": 60, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("targets") / "tiny"
    tiny_model("llama").save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


class Process:
    def __init__(self, *options):
        command = [
            sys.executable,
            "-m",
            "paceline",
            "serve",
            "--drafter",
            "prompt_lookup",
            "--port",
            "0",
            *options,
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self.url = ""
        for line in iter(self.process.stderr.readline, ""):
            self.lines.append(line)
            if found := re.search(r"on (http://\S+)", line):
                self.url = found.group(1)
                threading.Thread(target=self._read, daemon=True).start()
                break

    def _read(self):
        self.lines.extend(self.process.stderr)

    def wait_until_up(self):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return self
            except httpx.TransportError:
                time.sleep(0.05)
        raise AssertionError("".join(self.lines))

    def ask(self, **fields):
        return httpx.post(f"{self.url}/v1/completions", json=BODY | fields, timeout=60)


@pytest.fixture
def started(folder):
    processes = []

    def start(*options):
        processes.append(Process("--target", str(folder), "--dtype", "fp32", *options))
        return processes[-1]

    yield start
    for process in processes:
        process.process.kill()
        process.process.wait()


def test_sigterm_lets_a_stream_end_and_then_ends_the_server(started):
    server = started().wait_until_up()
    whole = server.ask().json()["choices"][0]["text"]
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=BODY | {"stream": True}, timeout=60
    ) as found:
        lines = found.iter_lines()
        first = next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = [first, *lines]
    data = [line[6:] for line in rest if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    texts = [httpx.Response(200, content=one).json()["choices"][0]["text"] for one in data[:-1]]
    assert "".join(texts) == whole
    assert server.process.wait(20) in (0, -signal.SIGTERM)


def test_after_a_kill_a_new_server_answers_as_before(started):
    first = started().wait_until_up()
    before = first.ask().json()["choices"][0]["text"]
    first.process.kill()
    with pytest.raises(httpx.TransportError):
        first.ask()
    assert started().wait_until_up().ask().json()["choices"][0]["text"] == before


def test_prompts_are_not_in_the_log_unless_asked_for(started):
    quiet, telling = started().wait_until_up(), started("--log-prompts").wait_until_up()
    for server in (quiet, telling):
        assert server.ask(prompt="a secret garden").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(20)
        time.sleep(0.2)
    assert "secret" not in "".join(quiet.lines)
    assert '"event": "request"' in "".join(quiet.lines)
    assert "secret garden" in "".join(telling.lines)


def test_what_keeps_it_from_starting_is_one_line(started, folder, tmp_path):
    damaged = tmp_path / "head"
    damaged.mkdir()
    (damaged / "config.json").write_text("{")
    (tmp_path / "keys").write_text("short")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        for options, says in (
            (("--drafter", "phrase", "--head", str(damaged)), "config.json"),
            (("--port", port), f"cannot listen on 127.0.0.1 port {port}"),
            (("--port", "70000"), "--port is 70000"),
            (("--max-concurrency", "0"), "--max-concurrency is 0"),
            (("--api-key-file", str(tmp_path / "keys")), "a key of 5 characters"),
            (("--other-drafter", "fhrase"), "did you mean 'phrase'"),
        ):
            server = started(*options)
            assert server.process.wait(60) == 2
            # A busy machine measures its forwards at every start, and says so.
            told = ("notice", "measuring what forwards")
            errors = [line for line in server.lines if not line.startswith(told)]
            assert len(errors) == 1, errors
            assert errors[0].startswith("error: ")
            assert says in errors[0]
