"""`paceline train phrase` end to end on a tiny model: stages, resuming, what changes redo."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.drafters.none import NoDrafter
from paceline.engine.generator import Generator
from paceline.errors import CheckpointError, ConfigError, PacelineError
from paceline.heads.checkpoint import load_head
from paceline.targets.huggingface import HuggingFaceTarget
from paceline.testing import TINY_EOS
from paceline.training import distill, phrase_stages, shards
from paceline.training.fit import PhraseFit
from paceline.training.phrase_options import PhraseTrainingOptions
from paceline.training.phrase_pipeline import PHRASE_PIPELINE
from paceline.training.pipeline import TrainingRun
from paceline.training.progress import Reporter
from paceline.training.workers import Task, run_workers

WORDS = [
    "the",
    "man",
    "ran",
    "to",
    "a",
    "hill",
    "and",
    "then",
    "the",
    "cat",
    "sat",
    "in",
    "rain",
    "with",
    "an",
    "old",
    "hat",
]
Start = Callable[..., TrainingRun]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A prompt file with 80 different questions."""
    path = tmp_path / "questions.jsonl"
    rows = [{"question": " ".join(WORDS[i % 7 : i % 7 + 2 + i % 5]) + f" {i}?"} for i in range(80)]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def start(tmp_path: Path, data: Path, target_of: Callable[..., HuggingFaceTarget], tokenizer: Any) -> Start:
    """A run that takes a second, with options changed by name."""
    generator = Generator(target_of("llama"), tokenizer, NoDrafter(), eos_token_ids=[TINY_EOS])

    def make(**changes: Any) -> TrainingRun:
        settings: dict[str, Any] = {
            "out": tmp_path / "head",
            "data": (str(data),),
            "num_tokens": 900,
            "max_new_tokens": 16,
            "batch_size": 8,
            "entries": 120,
            "width": 16,
            "epochs": 2,
            "train_batch_size": 64,
            "held_out": 0.2,
            "check_prompts": 2,
            "num_speculative_tokens": 8,
            "device": "cpu",
            "dtype": "fp32",
        }
        options = PhraseTrainingOptions(**{**settings, **changes})
        return TrainingRun(options, PHRASE_PIPELINE, Reporter(quiet=True), lambda _: generator)

    return make


def test_makes_a_head_folder_that_drafts(start: Start, tmp_path: Path) -> None:
    reported = start().run()
    loaded = load_head(tmp_path / "head")
    assert len(loaded.vocabulary) == loaded.config.num_entries == reported["vocabulary"]["num_entries"]
    assert reported["answers"]["num_tokens"] >= 900
    assert reported["evaluation"]["identical_fraction"] == 1.0
    assert reported["evaluation"]["mean_acceptance_length"] >= 1.0
    assert (tmp_path / "head" / "README.md").read_text().startswith("# Phrase head")


def test_provenance_names_data_and_target_but_no_private_folder(
    start: Start, tmp_path: Path, data: Path
) -> None:
    run = start()
    run.run()
    text = (tmp_path / "head" / "provenance.json").read_text()
    provenance = json.loads(text)
    assert provenance["target_fingerprint"] == run.context.generator.target.fingerprint
    assert list(provenance["data"]) == ["questions.jsonl"]
    assert len(provenance["data"]["questions.jsonl"]) == 64
    assert provenance["num_tokens"] >= 900
    assert "--num-tokens 900" in provenance["command"]
    assert str(tmp_path) not in text


def test_same_command_again_does_nothing(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start().run()
    weights = (tmp_path / "head" / "model.safetensors").read_bytes()

    def must_not_run(*_: Any, **__: Any) -> Any:
        raise AssertionError("a finished stage ran again")

    monkeypatch.setattr(distill.Distiller, "run", must_not_run)
    monkeypatch.setattr(PhraseFit, "run", must_not_run)
    monkeypatch.setattr(phrase_stages, "check_in_engine", must_not_run)
    second = start().run()
    assert json.loads(json.dumps(first)) == json.loads(json.dumps(second))
    assert (tmp_path / "head" / "model.safetensors").read_bytes() == weights


def test_deleted_head_is_exported_again(start: Start, tmp_path: Path) -> None:
    start().run()
    (tmp_path / "head" / "config.json").unlink()
    start().run()
    load_head(tmp_path / "head")


def test_interrupted_answers_are_kept_and_the_rest_follows(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain = start(work=tmp_path / "plain", stop_after="answers").run()["answers"]
    collected = 0
    collect = distill.Distiller._collect

    def interrupt(self: distill.Distiller, sequence: Any) -> None:
        nonlocal collected
        collected += 1
        collect(self, sequence)
        if collected == 20:
            raise KeyboardInterrupt

    monkeypatch.setattr(distill.Distiller, "_collect", interrupt)
    run = start()
    with pytest.raises(KeyboardInterrupt):
        run.run()
    kept = {answer.key for answer in shards.read_answers(run.context.answers_folder)}
    assert len(kept) == 20
    figures = start().run()["answers"]
    answers = list(shards.read_answers(run.context.answers_folder))
    assert kept < {answer.key for answer in answers}
    assert len({answer.key for answer in answers}) == len(answers) == figures["num_answers"]
    assert abs(figures["num_tokens"] - plain["num_tokens"]) < 8 * 16


def test_interrupted_fit_ends_with_the_same_weights(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start(epochs=3).run()
    weights = load_head(tmp_path / "head").head.state_dict()
    run_epoch = PhraseFit._run_epoch

    def interrupt(self: PhraseFit, epoch: int, on_step: Any) -> float:
        if epoch == 2:
            raise KeyboardInterrupt
        return run_epoch(self, epoch, on_step)

    other = {"epochs": 3, "out": tmp_path / "other", "work": tmp_path / "other.work"}
    monkeypatch.setattr(PhraseFit, "_run_epoch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        start(**other).run()
    monkeypatch.setattr(PhraseFit, "_run_epoch", run_epoch)
    start(**other).run()
    for name, tensor in load_head(tmp_path / "other").head.state_dict().items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=0)


@pytest.mark.parametrize("stage", ["vocabulary", "evaluation", "export"])
def test_goes_on_after_an_interruption_in(
    stage: str, start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    victim = {
        "vocabulary": (phrase_stages.PhraseVocabulary, "mine"),
        "evaluation": (phrase_stages, "check_in_engine"),
        "export": (phrase_stages, "save_head"),
    }[stage]

    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(*victim, interrupt)
        with pytest.raises(KeyboardInterrupt):
            start().run()
    assert not (tmp_path / "head").exists()
    start().run()
    load_head(tmp_path / "head")


def test_changed_fit_option_keeps_the_answers(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    before = start(stop_after="fit").run()

    def must_not_run(*_: Any, **__: Any) -> Any:
        raise AssertionError("answers were generated again")

    monkeypatch.setattr(distill.Distiller, "run", must_not_run)
    after = start(stop_after="fit", width=24).run()
    assert after["vocabulary"] == before["vocabulary"]
    assert after["fit"]["num_parameters"] > before["fit"]["num_parameters"]


def test_more_tokens_add_to_the_answers(start: Start) -> None:
    run = start(stop_after="answers", num_tokens=300)
    run.run()
    before = {path.name: path.read_bytes() for path in shards.shard_paths(run.context.answers_folder)}
    more = start(stop_after="answers", num_tokens=600)
    assert more.run()["answers"]["num_tokens"] >= 600
    assert more.context.answers_folder == run.context.answers_folder
    for name, content in before.items():
        assert (run.context.answers_folder / name).read_bytes() == content


def test_held_out_conversations_are_neither_mined_nor_trained_on(start: Start) -> None:
    run = start(stop_after="fit")
    run.run()
    context = run.context
    answers = list(shards.read_answers(context.answers_folder))
    held = [a for a in answers if context.is_held_out(a.root_key)]
    trained = [a for a in answers if context.is_training(a.root_key)]
    assert held
    assert trained
    assert len(held) + len(trained) == len(answers)
    assert not {a.root_key for a in held} & {a.root_key for a in trained}


def test_going_on_from_a_head_keeps_its_phrases(start: Start, tmp_path: Path) -> None:
    start().run()
    before = load_head(tmp_path / "head")
    again = start(
        out=tmp_path / "tuned",
        work=tmp_path / "head.work",
        init=tmp_path / "head",
        learning_rate=1e-12,
        weight_decay=0.0,
        num_tokens=700,
        export_dtype="bf16",
    )
    again.run()
    after = load_head(tmp_path / "tuned")
    assert after.vocabulary.token_ids == before.vocabulary.token_ids
    for name, tensor in after.head.state_dict().items():
        torch.testing.assert_close(tensor, before.head.state_dict()[name], rtol=0, atol=1e-2)


def test_target_writes_its_own_prompts_without_data(start: Start) -> None:
    run = start(data=(), synthesise=30, stop_after="prompts")
    figures = run.run()["prompts"]
    assert 0 < figures["num_prompts"] <= 30
    assert all(name.startswith("synthesised-") for name in figures["by_source"])
    again = start(
        data=(), synthesise=30, stop_after="prompts", work=run.context.options.out.with_name("else")
    )
    again.run()
    assert run.context.prompts_file.read_text() == again.context.prompts_file.read_text()


def test_excluded_prompts_are_dropped(start: Start, data: Path, tmp_path: Path) -> None:
    questions = data.read_text().splitlines()
    benchmark = tmp_path / "benchmark.jsonl"
    turns = [json.loads(questions[i])["question"].upper() for i in (3, 4)]
    benchmark.write_text("\n".join(json.dumps({"turns": [turn]}) for turn in turns))
    figures = start(exclude=(str(benchmark),), stop_after="prompts").run()["prompts"]
    assert figures["num_excluded"] == 2
    assert figures["num_prompts"] == 78


def test_disk_limit_is_checked_before_anything_is_generated(start: Start) -> None:
    run = start(max_disk_gb=1e-9)
    with pytest.raises(ConfigError, match="--max-disk"):
        run.run()
    assert not list(shards.shard_paths(run.context.answers_folder))


def test_second_run_in_the_same_folder_is_refused(start: Start) -> None:
    run = start(stop_after="prompts")
    with run.context.folder.locked(), pytest.raises(ConfigError, match="another training run"):
        start(stop_after="prompts").run()


def test_damaged_shard_is_named(start: Start) -> None:
    run = start(stop_after="answers")
    run.run()
    shard = shards.shard_paths(run.context.answers_folder)[0]
    shard.write_bytes(shard.read_bytes()[:200])
    with pytest.raises(CheckpointError, match=shard.name):
        start().run()


def test_head_of_other_layers_is_not_gone_on_from(start: Start, tmp_path: Path) -> None:
    start().run()
    with pytest.raises(PacelineError, match="feature-layers"):
        start(out=tmp_path / "tuned", init=tmp_path / "head", feature_layers=(1,)).run()


def test_head_reads_recorded_layers(start: Start, tmp_path: Path) -> None:
    reported = start(feature_layers=(1,)).run()
    assert load_head(tmp_path / "head").config.feature_layers == (1,)
    assert reported["evaluation"]["identical_fraction"] == 1.0


def test_two_workers_give_the_answers_of_one(
    start: Start, tmp_path: Path, target_of: Callable[..., HuggingFaceTarget], tokenizer: Any
) -> None:
    folder = tmp_path / "tiny"
    target_of("llama").model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    found = {}
    for workers in (1, 2):
        options = start(
            target=str(folder), work=tmp_path / f"work{workers}", workers=workers, stop_after="answers"
        ).context.options
        options = replace(options, num_tokens=10**6)
        run = TrainingRun(options, PHRASE_PIPELINE, Reporter(quiet=True))
        run.run()
        answers = shards.read_answers(run.context.answers_folder)
        found[workers] = {answer.key: answer.output_ids.tolist() for answer in answers}
    assert len(found[1]) == 80
    assert found[1] == found[2]


def test_error_of_a_worker_is_told_in_one_line(start: Start, tmp_path: Path) -> None:
    options = start(target=str(tmp_path / "missing"), workers=2).context.options
    task = Task("answers", options, tmp_path / "answers", (), 10)
    with pytest.raises(PacelineError, match=r"a worker failed: .*missing"):
        run_workers(task, lambda: None, lambda _: None)


ORPHAN = """
import multiprocessing, os, signal, sys, threading, time
from paceline.training.workers import _end_with_parent

def child(path):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # As workers do.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    open(path, "w").close()
    try:
        time.sleep(120)
    except KeyboardInterrupt:
        os.remove(path)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=child, args=(sys.argv[1],), daemon=True)
    process.start()
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.05)
    os._exit(1)  # As a killed process ends: nothing is cleaned up, daemons live on.
"""


def test_workers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """They get the interrupt that lets them save, so nobody keeps computing unseen."""
    script, mark = tmp_path / "orphan.py", tmp_path / "running"
    script.write_text(ORPHAN)
    assert subprocess.run([sys.executable, str(script), str(mark)], check=False).returncode == 1
    deadline = time.monotonic() + 60
    while mark.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not mark.exists()
