"""`paceline train`: every option reaches the run."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from paceline import cli
from paceline.training.eagle_options import EagleTrainingOptions
from paceline.training.phrase_options import PhraseTrainingOptions
from paceline.training.pipeline import TrainingRun

KINDS = [("phrase", PhraseTrainingOptions), ("eagle3", EagleTrainingOptions)]
# A value other than the default, as it is typed and as it arrives.
GIVEN = {
    "target": ("other", "other"),
    "data": ("a.jsonl", ("a.jsonl",)),
    "exclude": ("b.jsonl", ("b.jsonl",)),
    "work": ("w", Path("w")),
    "drafter": ("phrase", "phrase"),
    "head": ("h", Path("h")),
    "init": ("i", Path("i")),
    "export_dtype": ("fp32", "fp32"),
    "dtype": ("fp32", "fp32"),
    "device": ("cpu", "cpu"),
    "stop_after": ("fit", "fit"),
    "criterion": ("count", "count"),
    "loss": ("mass", "mass"),
    "inputs": ("hidden", ("hidden",)),
    "feature_layers": ("1,3", (1, 3)),
    "vocabulary": ("full", "full"),
    "static_corpus": ("c.jsonl", ("c.jsonl",)),
    "features": ("cached", "cached"),
    "out": ("o", Path("o")),
}


@pytest.fixture
def started(monkeypatch):
    """Options of the runs that were started; nothing is run."""
    found = []

    def run(self):
        found.append((self.context.options, self.stages))
        return {"prompts": {"num_prompts": 12345, "name": "x"}}

    monkeypatch.setattr(TrainingRun, "run", run)
    return found


def typed(kind):
    """Every option of a kind: words to type, and the values that must arrive."""
    words, values = [], {}
    for field in fields(kind):
        flag = f"--{field.name.replace('_', '-')}"
        if field.name in GIVEN:
            text, values[field.name] = GIVEN[field.name]
            words += [flag, text]
        elif field.type == "bool":
            words.append(flag)
            values[field.name] = True
        elif field.type in ("int", "int | None"):
            value = 2 if field.name == "max_words" else 7
            words += [flag, str(value)]
            values[field.name] = value
        else:
            assert field.type in ("float", "float | None"), field
            words += [flag, "0.125"]
            values[field.name] = 0.125
    return words, values


@pytest.mark.parametrize(("command", "kind"), KINDS)
def test_every_option_reaches_the_run(command, kind, started, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words, values = typed(kind)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", command, *words])
    assert stopped.value.code == 0
    ((options, stages),) = started
    assert type(options) is kind
    assert {field.name: getattr(options, field.name) for field in fields(kind)} == values
    assert tuple(stage.name for stage in stages) == kind.stages
    assert "num_prompts: 12,345" in capsys.readouterr().out


@pytest.mark.parametrize(("command", "kind"), KINDS)
def test_defaults_are_those_of_the_options(command, kind, started, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        cli.main(["train", command, "--out", "o"])
    assert started[0][0] == kind(out=Path("o"))


@pytest.mark.parametrize(("command", "kind"), KINDS)
def test_a_value_out_of_range_is_told_in_one_line(command, kind, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", command, "--out", "o", "--epochs", "0"])
    assert stopped.value.code == 2
    assert "--epochs is 0: it must be at least 1" in capsys.readouterr().err
