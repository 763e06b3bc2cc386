"""Head folders: written whole or not at all, and refused when anything is not as it should be."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import CheckpointError
from paceline.heads import checkpoint
from paceline.heads.checkpoint import default_head, load_head, pretrained_heads, save_head
from paceline.heads.inspection import inspect_head
from paceline.heads.phrase import PhraseHead, PhraseHeadConfig
from paceline.vocabularies.phrases import PhraseVocabulary

ENTRIES = ((1,), (1, 2), (3, 4, 0), (0,))
VOCABULARY = PhraseVocabulary(
    texts=tuple(map(str, ENTRIES)),
    token_ids=ENTRIES,
    counts=(4, 3, 2, 1),
    max_words=2,
    eos_token_ids=(0,),
    tokenizer_fingerprint="toy",
    tokenizer_size=10,
)
PROVENANCE = {"target": "toy", "target_fingerprint": "abc", "tokens": 12}


def new_head(seed: int = 0) -> PhraseHead:
    torch.manual_seed(seed)
    return PhraseHead(PhraseHeadConfig(hidden_size=8, num_entries=4, width=16, feature_layers=(1,))).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "heads" / "toy"
    save_head(path, new_head(), VOCABULARY, PROVENANCE, "# A toy head\n")
    return path


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_a_folder_holds_exactly_the_five_files(folder: Path) -> None:
    names = {"config.json", "model.safetensors", "phrases.json", "provenance.json", "README.md"}
    assert {file.name for file in folder.iterdir()} == names
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o644}
    assert [path.name for path in folder.parent.iterdir()] == ["toy"]


def test_a_loaded_head_scores_as_the_saved_one(folder: Path) -> None:
    loaded, inputs = load_head(folder), torch.randn(3, 24)
    assert torch.equal(loaded.head(inputs), new_head()(inputs))
    assert not loaded.head.training
    assert loaded.vocabulary == VOCABULARY
    assert loaded.config == new_head().config
    assert loaded.provenance == PROVENANCE


def test_a_head_with_a_step_is_saved_and_loaded_whole(tmp_path: Path) -> None:
    torch.manual_seed(3)
    head = PhraseHead(PhraseHeadConfig(hidden_size=8, num_entries=4, width=16, chain_entries=3)).eval()
    save_head(tmp_path / "chained", head, VOCABULARY, PROVENANCE, "")
    loaded = load_head(tmp_path / "chained")
    assert loaded.config.chain_entries == 3
    state, phrase = torch.randn(2, 16), torch.randn(2, 8)
    assert torch.equal(
        loaded.head.chained_scores(state, phrase, phrase), head.chained_scores(state, phrase, phrase)
    )


def test_a_head_with_a_ranking_is_saved_and_loaded_whole(tmp_path: Path) -> None:
    torch.manual_seed(3)
    head = PhraseHead(PhraseHeadConfig(hidden_size=8, num_entries=4, width=16, ranking_width=2)).eval()
    save_head(tmp_path / "ranked", head, VOCABULARY, PROVENANCE, "")
    loaded = load_head(tmp_path / "ranked")
    state = torch.randn(2, 16)
    assert torch.equal(loaded.head.ranking_scores(state), head.ranking_scores(state))


def test_a_folder_of_the_second_format_is_a_head_without_a_ranking(folder: Path) -> None:
    edit_json(folder / "config.json", lambda d: d.update(format_version=2))
    with pytest.raises(CheckpointError, match="ranking_width"):
        load_head(folder)
    edit_json(folder / "config.json", lambda d: d["head"].pop("ranking_width"))
    assert load_head(folder).head.ranking is None


def test_a_folder_of_the_first_format_is_a_head_without_a_step(folder: Path) -> None:
    """It knows no `chain_entries`; and one that names them is not of that format."""
    edit_json(folder / "config.json", lambda d: d.update(format_version=1))
    edit_json(folder / "config.json", lambda d: d["head"].pop("ranking_width"))
    with pytest.raises(CheckpointError, match="chain_entries"):
        load_head(folder)
    edit_json(folder / "config.json", lambda d: d["head"].pop("chain_entries"))
    loaded = load_head(folder)
    assert loaded.config == new_head().config
    assert loaded.head.step is None
    edit_json(folder / "config.json", lambda d: d.update(format_version=2))
    with pytest.raises(CheckpointError, match="chain_entries"):
        load_head(folder)


def test_parameters_stored_in_bf16_load_as_fp32(tmp_path: Path) -> None:
    save_head(tmp_path / "half", new_head(), VOCABULARY, PROVENANCE, "", dtype=torch.bfloat16)
    assert load_file(tmp_path / "half" / "model.safetensors")["output.weight"].dtype == torch.bfloat16
    loaded = load_head(tmp_path / "half").head
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    torch.testing.assert_close(loaded.output.weight, new_head().output.weight, rtol=0.01, atol=0.01)


def test_saving_again_replaces_the_folder_as_a_whole(folder: Path) -> None:
    (folder / "left_over.txt").write_text("old")
    save_head(folder, new_head(1), VOCABULARY, PROVENANCE, "new")
    assert not (folder / "left_over.txt").exists()
    assert torch.equal(load_head(folder).head.output.weight, new_head(1).output.weight)
    assert [path.name for path in folder.parent.iterdir()] == ["toy"]


def test_a_failed_save_leaves_the_old_head_and_no_litter(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        save_head(folder, new_head(1), VOCABULARY, PROVENANCE, "new")
    assert torch.equal(load_head(folder).head.output.weight, new_head().output.weight)
    assert [path.name for path in folder.parent.iterdir()] == ["toy"]


def test_head_and_vocabulary_must_fit_when_saved(tmp_path: Path) -> None:
    smaller = replace(VOCABULARY, texts=("a",), token_ids=((1,),), counts=(1,))
    with pytest.raises(CheckpointError, match="1 phrases for a head with 4 outputs"):
        save_head(tmp_path / "x", new_head(), smaller, {}, "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "phrases.json", "provenance.json"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} missing"):
        load_head(folder)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such head folder"):
        load_head(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(head_type="medusa"), "head_type is 'medusa', it must be 'phrase'"),
        (lambda d: d.update(format_version=7), "format_version is 7"),
        (lambda d: d.update(more=1), "has keys"),
        (lambda d: d.pop("head"), "has keys"),
        (lambda d: d["head"].pop("width"), "it must have exactly"),
        (lambda d: d["head"].update(widht=3), "it must have exactly"),
        (lambda d: d["head"].update(depth=0), "depth is 0"),
        (lambda d: d["head"].update(width="wide"), "width is 'wide'"),
        (lambda d: d["head"].update(hidden_size=9), "has shape"),
        (lambda d: d["head"].update(num_entries=5), "phrases.json has 4 entries, the head has 5"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(
    folder: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    edit_json(folder / "config.json", change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_head(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("output.bias"), r"missing tensors \['output.bias'\]"),
        (lambda t: t.update({"lm_head.weight": torch.ones(1)}), r"unknown tensors \['lm_head.weight'\]"),
        (lambda t: t.update({"output.bias": torch.ones(3)}), r"output.bias has shape \(3,\)"),
        (lambda t: t.update({"output.bias": torch.ones(4, dtype=torch.int32)}), "dtype torch.int32"),
        (lambda t: t["output.bias"].fill_(float("nan")), "output.bias holds values that are not finite"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    edit_tensors(folder / "model.safetensors", change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_head(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "provenance.json"])
def test_a_damaged_file_is_named(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"\x00broken")
    with pytest.raises(CheckpointError, match=name):
        load_head(folder)


def test_a_truncated_parameter_file_is_refused(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-8])
    with pytest.raises(CheckpointError, match="safetensors"):
        load_head(folder)


def test_the_default_head_is_found_by_fingerprint_or_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "PRETRAINED", tmp_path)
    for target, name, fingerprint in (("toy", "b", "abc"), ("toy", "a", "abc"), ("other", "c", "def")):
        provenance = PROVENANCE | {"target_fingerprint": fingerprint}
        save_head(tmp_path / target / name, new_head(), VOCABULARY, provenance, "")
    assert pretrained_heads() == [tmp_path / "other" / "c", tmp_path / "toy" / "a", tmp_path / "toy" / "b"]
    assert default_head("abc") == default_head("toy") == tmp_path / "toy" / "a"
    assert default_head("def") == tmp_path / "other" / "c"
    assert default_head("unknown") is None
    assert default_head("abc", "medusa") is None


def test_every_shipped_head_loads() -> None:
    for folder in pretrained_heads():
        assert inspect_head(folder).provenance["target_fingerprint"]
