"""A rival's process: what it is told, what it says, and how it ends."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from paceline.bench.peers import line_process
from paceline.bench.peers.line_process import LineProcess, PeerError
from paceline.bench.peers.llama_cpp import LlamaCppArm
from paceline.errors import UnsupportedFeatureError

# Speaks the protocol of llama_cpp.mjs: the answer is the prompt backwards, cut where it was told to.
STAND_IN = """
import json, sys
print(json.dumps({"release": "b1", "threads": 3}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    ids = []
    for token_id in reversed(asked["prompt_ids"]):
        ids.append(token_id)
        if token_id in asked["eos_token_ids"] or len(ids) == asked["max_new_tokens"]:
            break
    print(json.dumps({"ids": ids}), flush=True)
"""


def process(script, name="rival"):
    return LineProcess(name, [sys.executable, "-c", script])


def arm_of(tokenizer, script=STAND_IN, eos=(2,), context_len=64):
    command = [sys.executable, "-c", script]
    return LlamaCppArm("llama.cpp", command, tokenizer, eos, context_len=context_len, weights="bf16")


def wait_until_gone(pid):
    for _ in range(200):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_the_arm_sends_ids_and_limits_and_returns_the_ids_it_gets(tokenizer):
    arm = arm_of(tokenizer)
    [answer] = arm.answer([[5, 6, 2, 7, 8]], 10)
    assert answer.token_ids == (8, 7, 2)
    assert answer.text == tokenizer.decode([8, 7])
    assert answer.statistics is None
    assert arm.answer([[5, 6, 2, 7, 8]], 2)[0].token_ids == (8, 7)
    assert arm_of(tokenizer, eos=(8,)).answer([[7, 8]], 10)[0].token_ids == (8,)


def test_the_arm_describes_what_decodes(tokenizer):
    arm = arm_of(tokenizer)
    assert str(arm.name) == "llama.cpp/greedy"
    assert "llama.cpp b1" in str(arm.description["software"])
    assert (arm.description["weights"], arm.description["threads"]) == ("bf16", 3)


def test_the_arm_refuses_a_batch_and_what_does_not_fit(tokenizer):
    arm = arm_of(tokenizer, context_len=8)
    with pytest.raises(UnsupportedFeatureError, match="batch-size 1"):
        arm.answer([[5], [6]], 4)
    with pytest.raises(UnsupportedFeatureError, match=r"context of 8 tokens.*need 9"):
        arm.answer([[5, 6, 7, 8, 9]], 4)
    assert arm.answer([[5, 6, 7, 8]], 4)[0].token_ids == (8, 7, 6, 5)


def test_a_process_that_ends_says_why_in_its_own_last_words():
    dying = process("import sys; sys.stdin.readline(); sys.exit('noise\\nno such model')")
    with pytest.raises(PeerError, match="'rival' ended with 1: no such model"):
        dying.ask({}, "ids")


def test_a_process_that_ended_between_two_questions_is_noticed(tokenizer):
    arm = arm_of(tokenizer)
    arm.answer([[5, 6]], 2)
    arm._process._process.kill()
    arm._process._process.wait()
    with pytest.raises(PeerError, match=r"'llama\.cpp' ended with"):
        arm.answer([[5, 6]], 2)


def test_a_process_that_ends_without_a_word_is_reported_too():
    with pytest.raises(PeerError, match="ended with 3: it gave no reason"):
        process("import sys; sys.exit(3)").read()


@pytest.mark.parametrize("line", ["hello", "[1]", '{"id": [1]}'])
def test_a_line_that_is_no_answer_is_shown(line):
    with pytest.raises(PeerError, match="an object with ids was due"):
        process(f"print({line!r}, flush=True); input()").read("ids")


def test_a_program_that_is_not_there_is_one_clear_line():
    with pytest.raises(PeerError, match=r"cannot be started: .*no-such-program"):
        LineProcess("rival", ["no-such-program"])


def test_much_on_standard_error_does_not_block_the_process():
    talking = process("import sys; sys.stderr.write('x' * 1_000_000); print('{}', flush=True); input()")
    assert talking.read() == {}


def test_the_process_ends_with_its_object(tokenizer):
    arm = arm_of(tokenizer)
    pid = arm._process._process.pid
    assert psutil.pid_exists(pid)
    del arm
    assert not psutil.pid_exists(pid)


def test_a_process_that_ignores_the_end_of_its_input_is_killed(monkeypatch):
    monkeypatch.setattr(line_process, "_GRACE_SECONDS", 0.2)
    stubborn = process("import time; print('{}', flush=True); time.sleep(600)")
    stubborn.read()
    stubborn.close()
    assert stubborn._process.poll() not in (None, 0)


def test_the_process_ends_with_its_parent_even_when_that_is_killed():
    parent = (
        "import sys, time\n"
        "from paceline.bench.peers.line_process import LineProcess\n"
        f"kept = LineProcess('rival', [sys.executable, '-c', {STAND_IN!r}])\n"
        "kept.read()\n"
        "print(kept._process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as running:
        pid = int(running.stdout.readline())
        assert psutil.pid_exists(pid)
        running.kill()
    assert wait_until_gone(pid)
