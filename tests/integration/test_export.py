"""`paceline export` on a tiny target: what is written is what the reader of public checkpoints finds."""

from __future__ import annotations

import pytest
import torch

from paceline import cli
from paceline.heads.eagle import EagleConfig, EagleHead
from paceline.heads.eagle_folder import LoadedEagle, save_eagle
from paceline.heads.formats.eagle_checkpoint import load_public_eagle


@pytest.fixture
def target_folder(target_of, tokenizer, tmp_path):
    folder = tmp_path / "target"
    target_of("llama").model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def head_folder(tmp_path, target, *, rows=None, ids=None, **shape):
    size = target.hidden_size
    config = EagleConfig(
        **{
            "kind": "eagle3", "hidden_size": size, "target_hidden_size": size, "intermediate_size": 48,
            "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "feature_layers": (0, 1), **shape,
        }
    )  # fmt: skip
    torch.manual_seed(0)
    provenance = {"coverage": 0.9}
    loaded = LoadedEagle(EagleHead(config).eval(), None, ids, rows, provenance)
    save_eagle(tmp_path / "head", loaded, "")
    return tmp_path / "head"


def run(*words):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["export", *map(str, words)])
    return stopped.value.code


def options(target_folder, tmp_path):
    return ["--target", target_folder, "--out", tmp_path / "out", "--verifier-name", "owner/name"]


def test_rows_of_the_target_are_written_for_a_static_vocabulary(target_of, target_folder, tmp_path, capsys):
    target, ids = target_of("llama"), torch.tensor([1, 5, 7])
    head = head_folder(tmp_path, target, ids=ids)
    assert run(head, *options(target_folder, tmp_path), "--vocabulary", "static", "--dtype", "fp32") == 0
    found = load_public_eagle(tmp_path / "out", num_layers=target.num_layers, vocab_size=target.vocab_size)
    assert found.entry_ids.tolist() == [1, 5, 7]
    torch.testing.assert_close(found.output_weight, target.output_rows.weight[ids])
    assert "vllm serve owner/name" in capsys.readouterr().err


def test_a_full_vocabulary_is_not_written_a_second_time(target_of, target_folder, tmp_path):
    target = target_of("llama")
    head = head_folder(tmp_path, target, ids=torch.tensor([1, 5]))
    assert run(head, *options(target_folder, tmp_path)) == 0
    found = load_public_eagle(tmp_path / "out", num_layers=target.num_layers, vocab_size=target.vocab_size)
    assert found.entry_ids is None
    assert found.output_weight is None


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--vocabulary", "static"], "has no static vocabulary"),
        (["--vocabulary", "ful"], "did you mean 'full'"),
        (["--dtype", "bf"], "bf16"),
        (["--num-speculative-tokens", "0"], "it must be at least 1"),
    ],
)
def test_what_cannot_be_written_is_said_in_one_line(
    extra, message, target_of, target_folder, tmp_path, capsys
):
    head = head_folder(tmp_path, target_of("llama"))
    assert run(head, *options(target_folder, tmp_path), *extra) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_head_of_another_target_is_refused(target_of, target_folder, tmp_path, capsys):
    head = head_folder(tmp_path, target_of("llama"), feature_layers=(0, 9))
    assert run(head, *options(target_folder, tmp_path)) == 2
    assert "the target has layers" in capsys.readouterr().err


def test_a_name_that_vllm_cannot_load_is_asked_for(target_of, target_folder, tmp_path, capsys):
    head = head_folder(tmp_path, target_of("llama"))
    assert run(head, "--target", target_folder, "--out", tmp_path / "out") == 2
    assert "give --verifier-name" in capsys.readouterr().err
