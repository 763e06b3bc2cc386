"""Listing and inspecting heads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli.heads import heads
from paceline.errors import CheckpointError
from paceline.heads import checkpoint, inspection
from paceline.heads.inspection import HeadSummary


@pytest.fixture
def summary(monkeypatch):
    """A head that is inspected, without a folder."""
    from paceline.heads.phrase import PhraseHeadConfig

    config = PhraseHeadConfig(hidden_size=32, num_entries=8000)
    found = HeadSummary(
        Path("pretrained/tiny/phrase"), "phrase", config, "8,000 phrases", 3_434_000, 7_000_000, {"seed": 4}
    )
    monkeypatch.setattr(inspection, "inspect_head", lambda path: found)
    monkeypatch.setattr(checkpoint, "pretrained_heads", lambda: [found.path])
    return found


def test_shipped_heads_are_listed(summary, capsys):
    heads()
    text = capsys.readouterr().out
    for word in ("tiny", "phrase", "8,000", "3.43 M", "7.0 MB"):
        assert word in text


def test_an_installation_without_heads_says_so(monkeypatch, capsys):
    monkeypatch.setattr(checkpoint, "pretrained_heads", list)
    heads()
    assert "no heads" in capsys.readouterr().out


def test_a_folder_is_inspected_with_its_provenance(summary, capsys):
    heads(Path("anywhere"))
    text = capsys.readouterr().out
    assert "8,000 phrases" in text
    assert '"seed": 4' in text


@pytest.mark.parametrize("path", [None, Path("anywhere")])
def test_json_holds_everything(summary, capsys, path):
    heads(path, as_json=True)
    stored = json.loads(capsys.readouterr().out)
    stored = stored if path else stored[0]
    assert stored["num_parameters"] == 3_434_000
    assert stored["config"]["num_entries"] == 8000
    assert stored["provenance"] == {"seed": 4}


def test_a_folder_that_is_no_head_is_an_error(tmp_path):
    with pytest.raises(CheckpointError):
        heads(tmp_path)
