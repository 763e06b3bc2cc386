from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.training.loops import OCCURRENCES, WINDOW, loop_start
from paceline.training.samples import read_samples
from paceline.training.shards import Answer, write_shard
from paceline.vocabularies.phrases import PhraseVocabulary


def test_text_without_repetition_is_kept_whole() -> None:
    assert loop_start(list(range(50))) == 50
    assert loop_start([]) == 0


@pytest.mark.parametrize("period", [1, 3, 20])
def test_loop_is_cut_where_its_words_come_back_for_the_last_allowed_time(period: int) -> None:
    ids = list(range(100, 110)) + list(range(period)) * 200
    assert loop_start(ids) == 10 + WINDOW + (OCCURRENCES - 1) * period


def test_a_few_repetitions_are_no_loop() -> None:
    ids = [*range(12), 50] * (OCCURRENCES - 1)
    assert loop_start(ids) == len(ids)


@pytest.mark.parametrize("drop_loops", [True, False])
def test_rows_in_a_loop_are_not_trained_on(drop_loops: bool, tmp_path: Path) -> None:
    vocabulary = PhraseVocabulary(("a",), ((9,),), (1,), 1, (), "", 20)
    ids = torch.full((40,), 9)
    answer = Answer("k", "k", "s", torch.tensor([5, 6]), ids, torch.zeros(40, 1, 3), True)
    write_shard(tmp_path / "shard-0-00000.safetensors", [answer])
    samples = read_samples(tmp_path, vocabulary, lambda _: True, drop_loops=drop_loops)
    assert len(samples.trained) == (WINDOW + OCCURRENCES - 1 if drop_loops else 40)
