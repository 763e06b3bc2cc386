from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.training.eagle_options import EagleTrainingOptions
from paceline.training.phrase_options import PhraseTrainingOptions
from paceline.training.provenance import command_line
from paceline.training.run_folder import RunFolder, stage_key


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("held_out", 0.0),
        ("held_out", 1.0),
        ("num_tokens", 0),
        ("max_words", 6),
        ("dropout", 1.0),
        ("temperature", -1.0),
        ("learning_rate", 0.0),
        ("synthesise", -1),
        ("workers", 0),
        ("chain_entries", -1),
        ("max_disk_gb", 0.0),
    ],
)
def test_value_out_of_range_is_named_by_its_option(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} is {value}"):
        PhraseTrainingOptions(out=Path("x"), **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "nearest"),
    [
        ("loss", "mas", "mass"),
        ("stop_after", "fitt", "fit"),
        ("criterion", "counts", "count"),
        ("dtype", "bf", "bf16"),
        ("inputs", ("hiden",), "hidden"),
    ],
)
def test_unknown_name_shows_the_nearest(name: str, value: Any, nearest: str) -> None:
    with pytest.raises(ConfigError, match=nearest):
        PhraseTrainingOptions(out=Path("x"), **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("static_entries", 0),
        ("head_dim", -2),
        ("feature_layers", ()),
        ("feature_layers", (2, 2)),
        ("feature_layers", (-1, 2)),
        ("max_len", 2),
        ("step_decay", 0.0),
        ("loss_fraction", 0.0),
        ("loss_fraction", 1.5),
        ("gradient_norm", 0.0),
        ("num_steps", 0),
        ("epochs", 0),
    ],
)
def test_eagle_value_out_of_range_is_named_by_its_option(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"--{name.replace('_', '-')} is {re.escape(repr(value))}"):
        EagleTrainingOptions(out=Path("x"), **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "nearest"),
    [
        ("vocabulary", "speculated", "speculative"),
        ("features", "cache", "cached"),
        ("stop_after", "vocab", "vocabulary"),
        ("export_dtype", "fp", "fp32"),
    ],
)
def test_unknown_eagle_name_shows_the_nearest(name: str, value: Any, nearest: str) -> None:
    with pytest.raises(ConfigError, match=nearest):
        EagleTrainingOptions(out=Path("x"), **{name: value})


def test_target_writes_prompts_when_there_are_no_data() -> None:
    assert PhraseTrainingOptions(out=Path("x")).num_synthesised > 0
    assert PhraseTrainingOptions(out=Path("x"), data=("a.jsonl",)).num_synthesised == 0
    assert PhraseTrainingOptions(out=Path("x"), data=("a.jsonl",), synthesise=7).num_synthesised == 7


def test_work_folder_lies_beside_the_head() -> None:
    assert PhraseTrainingOptions(out=Path("a/head")).work_folder == Path("a/head.work")
    assert PhraseTrainingOptions(out=Path("a/head"), work=Path("b")).work_folder == Path("b")


def test_command_names_what_differs_and_no_folder(tmp_path: Path) -> None:
    options = PhraseTrainingOptions(
        out=tmp_path / "head",
        data=(str(tmp_path / "a.jsonl"), "owner/name"),
        width=300,
        feature_layers=(3, 9),
        inputs=("hidden",),
    )
    assert command_line(options) == (
        "paceline train phrase --out head --data a.jsonl --data owner/name --feature-layers 3,9 "
        "--inputs hidden --width 300"
    )


def test_command_of_an_eagle_head_names_its_kind_and_no_folder(tmp_path: Path) -> None:
    options = EagleTrainingOptions(
        out=tmp_path / "head",
        static_corpus=(str(tmp_path / "texts.jsonl"),),
        feature_layers=(1, 4),
        init=tmp_path / "old",
        epochs=7,
    )
    assert command_line(options) == (
        "paceline train eagle3 --out head --init old --epochs 7 --static-corpus texts.jsonl "
        "--feature-layers 1,4"
    )


def test_key_depends_on_options_and_on_the_stage_before() -> None:
    assert stage_key("a", {"x": 1, "y": 2}) == stage_key("a", {"y": 2, "x": 1})
    assert stage_key("a", {"x": 1}) != stage_key("b", {"x": 1})
    assert stage_key("a", {"x": 1}) != stage_key("a", {"x": 2})


def test_stage_is_done_under_its_own_key_alone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert folder.figures("fit", "k") is None
    folder.finish("fit", "k", {"n": 1})
    assert RunFolder(tmp_path / "run").figures("fit", "k") == {"n": 1}
    assert folder.figures("fit", "other") is None
