"""The benchmark loop: who is asked what, in which order, and what is counted."""

from __future__ import annotations

import itertools

import pytest

from bench_fakes import FakeArm
from paceline.bench.records import Journal
from paceline.bench.runner import WARM_UP_TOKENS, BenchmarkRunner
from paceline.bench.suites import BenchPrompt, Suite
from paceline.errors import ConfigError

SUITE = Suite("own", tuple(BenchPrompt(f"p{i}", (f"question {i}",)) for i in range(4)))


@pytest.fixture
def run(generator_of):
    def run(arms, suites=(SUITE,), journal=None, **settings):
        journal = Journal(None, {}) if journal is None else journal
        updates = []
        BenchmarkRunner(generator_of(), arms, suites, journal, **settings).run(updates.append)
        return journal, updates

    return run


def test_every_arm_is_given_the_same_ids(run, generator_of):
    arms = [FakeArm("none"), FakeArm("phrase"), FakeArm("hf_generate")]
    run(arms, max_new_tokens=20)
    # The first call of each arm warms it up.
    expected = [
        (tuple(generator_of().encode_chat([{"role": "user", "content": p.turns[0]}])),) for p in SUITE.prompts
    ]
    for arm in arms:
        assert [asked for asked, _ in arm.asked[1:]] == expected
        assert [limit for _, limit in arm.asked] == [WARM_UP_TOKENS, 20, 20, 20, 20]


def test_arms_alternate_prompt_by_prompt_and_take_turns_in_going_first(run):
    calls = []
    arms = [FakeArm(name, on_answer=lambda name=name: calls.append(name)) for name in "abc"]
    journal, _ = run(arms)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab" + "abc"
    assert [one.key.group for one in journal] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3


def test_the_clock_runs_only_while_an_arm_works(run):
    ticks = itertools.count()
    journal, _ = run([FakeArm("none")], clock=lambda: float(next(ticks)))
    assert [one.seconds for one in journal] == [1.0] * 4


def test_a_second_turn_holds_the_arms_own_answer(run, generator_of):
    suite = Suite("two", (BenchPrompt("p", ("first", "second")),))
    arms = [FakeArm("none", text="abc"), FakeArm("phrase", text="xyz")]
    journal, _ = run(arms, [suite])
    for arm, one in zip(arms, journal, strict=True):
        history = [("user", "first"), ("assistant", arm.text), ("user", "second")]
        ids = generator_of().encode_chat([{"role": role, "content": text} for role, text in history])
        assert one.turns[1].prompt_ids == tuple(ids)
        assert [turn.turn for turn in one.turns] == [0, 1]
        assert one.num_tokens == 6


def test_batches_keep_the_order_and_the_rest_is_a_smaller_batch(run):
    arm = FakeArm("none")
    journal, _ = run([arm], batch_sizes=(3,))
    assert [len(asked) for asked, _ in arm.asked] == [3, 3, 1]
    assert [[turn.prompt_id for turn in one.turns] for one in journal] == [["p0", "p1", "p2"], ["p3"]]


def test_in_a_batch_only_prompts_that_have_a_second_turn_get_one(run):
    suite = Suite("mixed", (BenchPrompt("a", ("x",)), BenchPrompt("b", ("x", "y"))))
    journal, _ = run([FakeArm("none")], [suite], batch_sizes=(2,))
    [one] = journal
    assert [(turn.prompt_id, turn.turn) for turn in one.turns] == [("a", 0), ("b", 0), ("b", 1)]


def test_every_batch_size_is_measured_on_its_own(run):
    journal, _ = run([FakeArm("none")], batch_sizes=(1, 4))
    assert [one.key.batch_size for one in journal] == [1, 1, 1, 1, 4]


def test_an_interrupted_run_measures_only_what_is_missing(run, tmp_path):
    def broken():
        if len(second.asked) == 3:
            raise KeyboardInterrupt

    first, second = FakeArm("none"), FakeArm("phrase", on_answer=broken)
    with pytest.raises(KeyboardInterrupt):
        run([first, second], journal=Journal(tmp_path, {}))
    done = list(Journal(tmp_path, {}))
    first, second = FakeArm("none"), FakeArm("phrase")
    journal, _ = run([first, second], journal=Journal(tmp_path, {}))
    assert len(journal) == 8
    assert list(journal)[: len(done)] == done
    assert len(first.asked) + len(second.asked) == 2 + 8 - len(done)


def test_a_finished_run_asks_nobody(run, tmp_path):
    run([FakeArm("none")], journal=Journal(tmp_path, {}))
    arm = FakeArm("none")
    run([arm], journal=Journal(tmp_path, {}))
    assert arm.asked == []


def test_progress_counts_up_to_all_measurements(run):
    _, updates = run([FakeArm("none"), FakeArm("phrase")])
    assert [update.num_done for update in updates] == list(range(9))
    assert {update.num_total for update in updates} == {8}


def test_a_model_without_chat_template_is_asked_raw(generator_of, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    arm = FakeArm("none", text="abc")
    suite = Suite("two", (BenchPrompt("p", ("first", "second")),))
    journal = Journal(None, {})
    BenchmarkRunner(generator_of(), [arm], [suite], journal).run()
    [one] = journal
    texts = [tokenizer.decode(list(turn.prompt_ids)) for turn in one.turns]
    assert texts == ["first", "first\n\nabc\n\nsecond"]


def test_the_limit_shrinks_to_what_the_context_leaves_for_the_longest_prompt(run, generator_of):
    context_len = generator_of().target.context_len
    suite = Suite("long", (BenchPrompt("a", ("x" * 200,)), BenchPrompt("b", ("y",))))
    arm = FakeArm("none")
    run([arm], [suite], max_new_tokens=128, batch_sizes=(2,))
    longest = max(len(ids) for ids in arm.asked[-1][0])
    assert arm.asked[-1][1] == context_len - longest < 128


def test_a_prompt_without_room_is_named_before_anything_is_measured(run):
    suite = Suite("long", (BenchPrompt("fits", ("x",)), BenchPrompt("too-long", ("x" * 300,))))
    arm = FakeArm("none")
    with pytest.raises(ConfigError, match="'too-long'"):
        run([arm], [suite])
    assert arm.asked == []
