"""Head folders in figures, whatever kind of head they hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paceline.errors import CheckpointError
from paceline.heads.checkpoint import default_head, load_head, pretrained_heads
from paceline.heads.eagle import EagleConfig, EagleHead
from paceline.heads.eagle_folder import LoadedEagle, save_eagle
from paceline.heads.inspection import inspect_head
from paceline.vocabularies.speculative import VocabularyRanking

EAGLE = LoadedEagle(
    EagleHead(EagleConfig("eagle3", 32, 32, 48, 4, 2, 24, feature_layers=(0, 1, 2))),
    VocabularyRanking(32, 50),
    torch.tensor([1, 4, 9]),
    None,
    {"target_fingerprint": "abc"},
)


def test_a_phrase_head():
    folder = next(folder for folder in pretrained_heads() if folder.name == "phrase-chained")
    summary, loaded = inspect_head(folder), load_head(folder)
    assert (summary.path, summary.head_type, summary.config) == (folder, "phrase", loaded.config)
    assert summary.outputs == "32,000 phrases of at most 3 words"
    assert summary.num_parameters == loaded.head.num_parameters
    assert summary.num_bytes == sum(file.stat().st_size for file in folder.iterdir())
    assert summary.provenance == loaded.provenance


@pytest.mark.parametrize(
    ("changes", "outputs", "num_more"),
    [
        ({}, "full, static (3), speculative (ranking of width 4)", 32 * 4 + 4 * 50),
        ({"ranking": None, "static_ids": None}, "full", 0),
        ({"ranking": None, "rows": torch.ones(3, 32)}, "static (3 rows of its own)", 3 * 32),
    ],
)
def test_an_eagle_head_and_its_vocabularies(tmp_path, changes, outputs, num_more):
    save_eagle(tmp_path / "head", replace(EAGLE, **changes), "")
    summary = inspect_head(tmp_path / "head")
    assert (summary.head_type, summary.outputs) == ("eagle3", outputs)
    assert summary.num_parameters == EAGLE.head.num_parameters + num_more
    assert summary.provenance == {"target_fingerprint": "abc"}


def test_the_default_head_is_one_of_the_wanted_kind(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.heads.checkpoint.PRETRAINED", tmp_path)
    save_eagle(tmp_path / "toy" / "a", EAGLE, "")
    assert default_head("abc") is None
    assert default_head("abc", "eagle3") == tmp_path / "toy" / "a"


def test_other_folders_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="missing"):
        inspect_head(tmp_path)
    (tmp_path / "config.json").write_text('{"head_type": "medusa"}')
    with pytest.raises(CheckpointError):
        inspect_head(tmp_path)
