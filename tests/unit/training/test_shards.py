"""Shards give back what was written, and only whole ones count."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import CheckpointError, ConfigError
from paceline.training.shards import (
    Answer,
    check_disk,
    predicted_bytes,
    read_answers,
    read_shard,
    shard_paths,
    write_shard,
)


def answer_of(number: int, num_prompt: int, num_output: int) -> Answer:
    generator = torch.Generator().manual_seed(number)
    return Answer(
        f"key{number}",
        f"root{number}",
        "s",
        torch.randint(0, 90, (num_prompt,), generator=generator),
        torch.randint(0, 90, (num_output,), generator=generator),
        torch.randn(num_output, 2, 5, generator=generator).to(torch.bfloat16),
        bool(number % 2),
    )


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=6))
def test_shard_gives_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[tuple[int, int]]
) -> None:
    answers = [answer_of(i, *size) for i, size in enumerate(sizes)]
    path = tmp_path_factory.mktemp("shards") / "shard-0-00000.safetensors"
    write_shard(path, answers)
    for written, found in zip(answers, read_shard(path), strict=True):
        assert (found.key, found.root_key, found.source) == (written.key, written.root_key, written.source)
        assert found.is_complete == written.is_complete
        assert torch.equal(found.prompt_ids, written.prompt_ids)
        assert torch.equal(found.output_ids, written.output_ids)
        assert torch.equal(found.states, written.states)


def test_unfinished_file_is_no_shard(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard-0-00000.safetensors", [answer_of(0, 2, 3)])
    (tmp_path / "shard-0-00001.safetensors.77.partial").write_bytes(b"half")
    assert [path.name for path in shard_paths(tmp_path)] == ["shard-0-00000.safetensors"]


def test_damaged_shard_is_named(tmp_path: Path) -> None:
    (tmp_path / "shard-0-00000.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match="shard-0-00000"):
        list(read_answers(tmp_path))


def test_prompt_that_was_answered_twice_counts_once(tmp_path: Path) -> None:
    for number in range(2):
        write_shard(tmp_path / f"shard-{number}-00000.safetensors", [answer_of(0, 2, 3)])
    assert len(list(read_answers(tmp_path))) == 1


def test_newest_tokens_lag_the_outputs_by_one() -> None:
    answer = answer_of(1, 3, 4)
    assert answer.newest_ids.tolist() == [answer.prompt_ids[-1].item(), *answer.output_ids[:-1].tolist()]


def test_disk_is_predicted_within_a_tenth(tmp_path: Path) -> None:
    answers = [answer_of(i, 40, 60) for i in range(50)]
    wide = [
        Answer(
            a.key, a.root_key, a.source, a.prompt_ids, a.output_ids, torch.zeros(60, 1, 576).bfloat16(), True
        )
        for a in answers
    ]
    write_shard(tmp_path / "shard-0-00000.safetensors", wide)
    size = (tmp_path / "shard-0-00000.safetensors").stat().st_size
    assert abs(predicted_bytes(50 * 60, 576) - size) < 0.1 * size


def test_limits_of_the_disk_are_kept(tmp_path: Path) -> None:
    check_disk(tmp_path / "not" / "there", 1000, 1000)
    with pytest.raises(ConfigError, match="--max-disk-gb"):
        check_disk(tmp_path, 1001, 1000)
    with pytest.raises(ConfigError, match="are free"):
        check_disk(tmp_path, 10**18, None)
