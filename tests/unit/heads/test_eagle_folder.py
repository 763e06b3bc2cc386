"""Folders of EAGLE heads: whole, strict, and one for all vocabularies."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import CheckpointError
from paceline.heads.eagle import EagleConfig, EagleHead
from paceline.heads.eagle_folder import LoadedEagle, load_eagle, save_eagle
from paceline.vocabularies.speculative import VocabularyRanking

V = 50
CONFIG = EagleConfig(
    "eagle3", 32, 32, 48, 4, 2, 24, feature_layers=(0, 1, 2),
    rope_parameters={"rope_type": "default", "rope_theta": 5e5},
)  # fmt: skip


def loaded(**changes) -> LoadedEagle:
    torch.manual_seed(0)
    whole = LoadedEagle(
        EagleHead(CONFIG), VocabularyRanking(32, V), torch.tensor([1, 4, 9]), None,
        {"target_fingerprint": "abc", "coverage": 0.75},
    )  # fmt: skip
    return replace(whole, **changes)


@pytest.fixture
def folder(tmp_path):
    save_eagle(tmp_path / "head", loaded(), "# A toy\n")
    return tmp_path / "head"


def test_a_folder_is_read_as_it_was_written(folder):
    found, expected = load_eagle(folder), loaded()
    assert found.head.config == CONFIG
    for name, tensor in expected.head.state_dict().items():
        assert torch.equal(found.head.state_dict()[name], tensor)
    assert torch.equal(found.head.inverse_frequencies, expected.head.inverse_frequencies)
    assert torch.equal(found.ranking.vocabulary.weight, expected.ranking.vocabulary.weight)
    assert torch.equal(found.static_ids, expected.static_ids)
    assert found.rows is None
    assert found.coverage == 0.75
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md", "config.json", "model.safetensors", "provenance.json"
    ]  # fmt: skip


def test_what_a_head_lacks_is_not_stored(tmp_path):
    save_eagle(tmp_path / "bare", loaded(ranking=None, static_ids=None), "", dtype=torch.bfloat16)
    found = load_eagle(tmp_path / "bare")
    assert (found.ranking, found.static_ids, found.rows) == (None, None, None)
    assert found.head.dtype is torch.float32
    assert {name.split(".")[0] for name in load_file(tmp_path / "bare" / "model.safetensors")} == {"head"}


def test_rows_of_its_own_come_with_their_ids(tmp_path):
    rows = torch.randn(3, 32)
    save_eagle(tmp_path / "own", loaded(rows=rows), "")
    assert torch.equal(load_eagle(tmp_path / "own").rows, rows)
    for ids in (None, torch.tensor([1, 2])):
        with pytest.raises(CheckpointError, match="give one id a row"):
            save_eagle(tmp_path / "bad", loaded(rows=rows, static_ids=ids), "")
    assert not (tmp_path / "bad").exists()


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("head.fc.weight"), r"head has fc.weight missing"),
        (lambda t: t.update({"head.extra": torch.ones(1)}), "extra"),
        (lambda t: t.update({"other.weight": torch.ones(1)}), "unknown tensor 'other.weight'"),
        (lambda t: t.pop("ranking.down.weight"), "ranking has down.weight missing"),
        (lambda t: t.pop("ranking.vocabulary.weight"), "no matrix vocabulary.weight"),
        (lambda t: t["head.norm.weight"].fill_(torch.nan), "not finite"),
        (lambda t: t.update({"rows.weight": torch.ones(2, 32)}), "2 rows of an output layer and 3 ids"),
    ],
)
def test_damaged_weights_are_refused(folder, change, named):
    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=named):
        load_eagle(folder)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"head_type": "phrase"}, "head_type is 'phrase'"),
        ({"format_version": 7}, "format_version is 7"),
        ({"head": {"kind": "eagle3"}}, "must have exactly"),
        ({"more": 1}, "keys are"),
    ],
)
def test_other_configurations_are_refused(folder, change, named):
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, **change}))
    with pytest.raises(CheckpointError, match=named):
        load_eagle(folder)


@pytest.mark.parametrize("coverage", [None, 0, 1.5, True])
def test_a_coverage_that_is_no_share_is_refused(tmp_path, coverage):
    save_eagle(tmp_path / "head", loaded(provenance={"coverage": coverage}), "")
    with pytest.raises(CheckpointError, match="coverage is"):
        load_eagle(tmp_path / "head")


def test_incomplete_folders_are_refused(folder):
    (folder / "provenance.json").unlink()
    with pytest.raises(CheckpointError, match=r"provenance\.json missing"):
        load_eagle(folder)
    with pytest.raises(CheckpointError, match="no such head folder"):
        load_eagle(folder / "nowhere")
