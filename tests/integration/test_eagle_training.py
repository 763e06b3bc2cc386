"""`paceline train eagle3` end to end on a tiny model: stages, vocabularies, what a change redoes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.drafters.eagle import EagleDrafter
from paceline.drafters.none import NoDrafter
from paceline.engine.generator import Generator
from paceline.errors import CheckpointError, ConfigError
from paceline.heads.eagle_folder import load_eagle
from paceline.heads.inspection import inspect_head
from paceline.targets.huggingface import HuggingFaceTarget
from paceline.testing import TINY_EOS
from paceline.training import distill, eagle_stages
from paceline.training.eagle_fit import EagleFit
from paceline.training.eagle_options import EagleTrainingOptions
from paceline.training.eagle_pipeline import EAGLE_PIPELINE
from paceline.training.eagle_setup import static_ids
from paceline.training.phrase_options import PhraseTrainingOptions
from paceline.training.phrase_pipeline import PHRASE_PIPELINE
from paceline.training.pipeline import TrainingRun
from paceline.training.progress import Reporter

Start = Callable[..., TrainingRun]
DATA: dict[str, Any] = {
    "num_tokens": 600,
    "max_new_tokens": 16,
    "batch_size": 8,
    "held_out": 0.2,
    "check_prompts": 2,
    "num_speculative_tokens": 8,
    "device": "cpu",
    "dtype": "fp32",
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A prompt file with 60 different questions."""
    path = tmp_path / "questions.jsonl"
    words = ["the", "cat", "sat", "in", "a", "hat", "and", "then", "ran", "to", "an", "old", "man"]
    rows = [{"question": " ".join(words[i % 6 : i % 6 + 2 + i % 5]) + f" {i}?"} for i in range(60)]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def generator(target_of: Callable[..., HuggingFaceTarget], tokenizer: Any) -> Generator:
    """A tiny Llama."""
    return Generator(target_of("llama"), tokenizer, NoDrafter(), eos_token_ids=[TINY_EOS])


@pytest.fixture
def start(tmp_path: Path, data: Path, generator: Generator) -> Start:
    """A run that takes a second or two, with options changed by name."""

    def make(**changes: Any) -> TrainingRun:
        settings: dict[str, Any] = {
            **DATA,
            "out": tmp_path / "head",
            "data": (str(data),),
            "epochs": 2,
            "num_steps": 3,
            "batch_tokens": 256,
            "static_entries": 30,
            "feature_layers": (0, 1),
            "export_dtype": "fp32",
        }
        options = EagleTrainingOptions(**{**settings, **changes})
        return TrainingRun(options, EAGLE_PIPELINE, Reporter(quiet=True), lambda _: generator)

    return make


def must_not_run(*_: Any, **__: Any) -> Any:
    """In place of what is done already."""
    raise AssertionError("a finished stage ran again")


def test_makes_a_folder_that_serves_all_vocabularies(
    start: Start, tmp_path: Path, generator: Generator
) -> None:
    reported = start().run()
    loaded = load_eagle(tmp_path / "head")
    assert loaded.ranking is not None
    assert loaded.rows is None, "the static vocabulary is ids alone"
    assert loaded.static_ids is not None
    assert len(loaded.static_ids) == 30
    assert TINY_EOS in loaded.static_ids.tolist()
    assert 0 < loaded.coverage == reported["vocabulary"]["coverage"] <= 1
    shape = generator.target.layer_shape
    assert shape is not None
    assert loaded.head.config.num_heads == shape.num_heads
    assert loaded.head.config.head_dim == shape.head_dim
    assert dict(loaded.head.config.rope_parameters) == dict(shape.rope_parameters)
    for name in ("full", "static", "speculative"):
        figures = reported["evaluation"][name]
        assert figures["identical_fraction"] == 1.0
        assert figures["mean_acceptance_length"] >= 1.0
    assert reported["fit"]["num_learned_tokens"] > 300
    text = (tmp_path / "head" / "README.md").read_text()
    assert text.startswith("# EAGLE-3 head")
    assert "| speculative | 8 |" in text
    assert "static (30)" in inspect_head(tmp_path / "head").outputs
    drafter = EagleDrafter.build(generator.target, tmp_path / "head", 8)
    assert drafter.required_features == (0, 1)


def test_provenance_names_everything_but_no_private_folder(start: Start, tmp_path: Path, data: Path) -> None:
    start(static_corpus=(str(data),)).run()
    text = (tmp_path / "head" / "provenance.json").read_text()
    provenance = json.loads(text)
    assert provenance["command"].startswith("paceline train eagle3 --out head --data questions.jsonl")
    assert "--static-corpus questions.jsonl" in provenance["command"]
    assert len(provenance["stages"]["fit"]["history"]) == 2
    assert str(tmp_path) not in text


def test_same_command_again_does_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    first = start().run()
    monkeypatch.setattr(distill.Distiller, "run", must_not_run)
    monkeypatch.setattr(EagleFit, "run", must_not_run)
    monkeypatch.setattr(eagle_stages, "check_in_engine", must_not_run)
    second = start().run()
    assert json.loads(json.dumps(first)) == json.loads(json.dumps(second))


def test_another_subset_leaves_the_weights_as_they_are(
    start: Start, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FR-Spec and VocabTrim are pruned from the same weights."""
    start().run()
    by_answers = load_eagle(tmp_path / "head")
    monkeypatch.setattr(EagleFit, "run", must_not_run)
    start(out=tmp_path / "other", work=tmp_path / "head.work", static_corpus=(str(data),)).run()
    by_corpus = load_eagle(tmp_path / "other")
    for name, tensor in by_answers.head.state_dict().items():
        assert torch.equal(tensor, by_corpus.head.state_dict()[name]), name
    assert by_answers.static_ids.tolist() != by_corpus.static_ids.tolist()
    assert by_corpus.coverage < by_answers.coverage, "both are measured on what the target says"


def test_a_head_that_is_trained_reduced_has_rows_of_its_own(start: Start, tmp_path: Path) -> None:
    reported = start(vocabulary="static").run()
    loaded = load_eagle(tmp_path / "head")
    assert loaded.rows is not None
    assert loaded.rows.shape[0] == len(loaded.static_ids) == 30
    assert set(reported["evaluation"]) == {"num_prompts", "static"}
    assert reported["evaluation"]["static"]["identical_fraction"] == 1.0
    other = start(vocabulary="static", static_entries=31, stop_after="fit").run()
    assert other["fit"]["num_parameters"] > reported["fit"]["num_parameters"], "its fit depends on the subset"


def test_rows_keep_the_tokens_they_were_trained_for_when_answers_are_added(
    start: Start, tmp_path: Path
) -> None:
    """Another run in the same folder may add answers between the fit and the stages behind it."""
    run = start(vocabulary="static", num_tokens=300, stop_after="fit")
    run.run()
    (weights,) = run.context.folder.root.glob("eagle3-fit-*/weights.safetensors")
    trained = load_file(weights)["row_ids"]
    start(num_tokens=900, stop_after="answers").run()
    assert static_ids(run.context).entry_ids.tolist() != trained.tolist(), "the case in question"
    start(vocabulary="static", num_tokens=300).run()
    assert load_eagle(tmp_path / "head").static_ids.tolist() == trained.tolist()


def test_a_full_vocabulary_trains_the_head_alone(start: Start, tmp_path: Path) -> None:
    reported = start(vocabulary="full").run()
    loaded = load_eagle(tmp_path / "head")
    assert loaded.ranking is None
    assert loaded.rows is None
    assert {"full", "static"} < set(reported["evaluation"])


def test_fine_tuning_keeps_the_vocabulary(start: Start, tmp_path: Path) -> None:
    """Row 52 of the public faults: rows that were trained go on meaning what they meant."""
    start(vocabulary="static").run()
    before = load_eagle(tmp_path / "head")
    start(
        vocabulary="static", out=tmp_path / "tuned", init=tmp_path / "head", feature_layers=None,
        static_entries=None, num_tokens=700, learning_rate=1e-9,
    ).run()  # fmt: skip
    after = load_eagle(tmp_path / "tuned")
    assert torch.equal(before.static_ids, after.static_ids)
    torch.testing.assert_close(before.rows, after.rows, rtol=0, atol=1e-4)
    for name, tensor in before.head.state_dict().items():
        torch.testing.assert_close(tensor, after.head.state_dict()[name], rtol=0, atol=1e-4)


def test_fine_tuning_keeps_the_ids_of_a_head_that_scores_with_the_targets_rows(
    start: Start, tmp_path: Path
) -> None:
    start(static_entries=25).run()
    before = load_eagle(tmp_path / "head")
    start(
        out=tmp_path / "tuned", init=tmp_path / "head", feature_layers=None, static_entries=None,
        learning_rate=1e-9,
    ).run()  # fmt: skip
    after = load_eagle(tmp_path / "tuned")
    assert torch.equal(before.static_ids, after.static_ids)
    torch.testing.assert_close(
        before.ranking.vocabulary.weight, after.ranking.vocabulary.weight, rtol=0, atol=1e-4
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"feature_layers": (1,)}, "feature_layers"),
        ({"feature_layers": None, "num_heads": 8}, "num_heads"),
        ({"feature_layers": None, "static_entries": 12}, "static_entries"),
        ({"feature_layers": None, "vocabulary": "static"}, "was trained with the target's output layer"),
    ],
)
def test_a_head_is_not_gone_on_from_as_something_else(
    changes: dict[str, Any], message: str, start: Start, tmp_path: Path
) -> None:
    start(check_prompts=0).run()
    with pytest.raises(CheckpointError, match=message):
        start(out=tmp_path / "tuned", work=tmp_path / "head.work", init=tmp_path / "head", **changes).run()


def test_layers_that_the_target_lacks_are_refused(start: Start) -> None:
    with pytest.raises(ConfigError, match=r"--feature-layers names \[9\]"):
        start(feature_layers=(0, 9)).run()


def test_states_may_be_read_once_and_kept(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(features="cached")
    cached = run.run()["fit"]
    assert list(run.context.folder.root.glob("states-*/shard-*.safetensors"))
    again = start(features="cached", epochs=3, stop_after="fit")
    monkeypatch.setattr(eagle_stages.OnlineStates, "states", must_not_run)
    assert again.run()["fit"]["history"][0]["epoch"] == 1
    assert cached["num_texts"] > 0


def test_disk_for_states_is_checked_first(start: Start) -> None:
    start(stop_after="answers").run()
    # Answers take 600 tokens of final states; three vectors at every prompt token are more.
    with pytest.raises(ConfigError, match="--max-disk"):
        start(features="cached", max_disk_gb=2e-4, stop_after="fit").run()


def test_prompts_and_answers_are_shared_with_phrase_heads(
    start: Start, generator: Generator, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(work=tmp_path / "work").run()
    monkeypatch.setattr(distill.Distiller, "run", must_not_run)
    options = PhraseTrainingOptions(
        **DATA, out=tmp_path / "phrase", data=(str(data),), work=tmp_path / "work", entries=80, width=16,
        epochs=1,
    )  # fmt: skip
    TrainingRun(options, PHRASE_PIPELINE, Reporter(quiet=True), lambda _: generator).run()
    monkeypatch.setattr(EagleFit, "run", must_not_run)
    start(work=tmp_path / "work").run()
