"""Which row is trained on what: the off-by-one proof, the mask, and what is left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import ConfigError
from paceline.training.samples import Samples, answer_rows, read_samples
from paceline.training.shards import Answer, write_shard
from paceline.vocabularies.phrases import PhraseVocabulary

EOS = 2
ENTRIES = ((10,), (10, 11), (10, 11, 12, 13), (12,), (14, EOS), (EOS,), (13,))


def vocabulary() -> PhraseVocabulary:
    return PhraseVocabulary(
        texts=tuple(str(i) for i in range(len(ENTRIES))),
        token_ids=ENTRIES,
        counts=(1,) * len(ENTRIES),
        max_words=3,
        eos_token_ids=(EOS,),
        tokenizer_fingerprint="",
        tokenizer_size=96,
    )


def answer(prompt: list[int], output: list[int], *, complete: bool = True, key: str = "k") -> Answer:
    states = torch.tensor([[[float(i)] * 3] for i in range(len(output))]).reshape(-1, 1, 3)
    return Answer(key, key, "s", torch.tensor(prompt), torch.tensor(output), states, complete)


@pytest.fixture
def samples_of(tmp_path: Path) -> Callable[..., Samples]:
    def make(
        *shards: list[Answer], wanted: Callable[[Answer], bool] = lambda _: True, num_followers: int = 0
    ) -> Samples:
        for number, answers in enumerate(shards):
            write_shard(tmp_path / f"shard-0-{number:05d}.safetensors", answers)
        return read_samples(tmp_path, vocabulary(), wanted, num_followers=num_followers)

    return make


def test_prints_input_target_and_mask_of_every_row(
    samples_of: Callable[..., Samples], capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault 66: every output token, first and end included, is predicted by the row in front of it."""
    prompt, output = [5, 6, 7], [10, 11, 50, 12, 14, EOS]
    samples = samples_of([answer(prompt, output)])
    trained = set(samples.trained.tolist())
    for row in range(len(samples)):
        entry = int(samples.entries[row])
        target = list(ENTRIES[entry]) if entry >= 0 else None
        state = int(samples.states(torch.tensor([row]))[0, 0, 0])
        print(f"state {state}, newest {int(samples.newest_ids[row])} -> {target}, mask {row in trained:d}")
    assert capsys.readouterr().out.splitlines() == [
        "state 0, newest 7 -> [10, 11], mask 1",
        "state 1, newest 10 -> None, mask 0",
        "state 2, newest 11 -> None, mask 0",
        "state 3, newest 50 -> [12], mask 1",
        "state 4, newest 12 -> [14, 2], mask 1",
        "state 5, newest 14 -> [2], mask 1",
    ]


def test_no_row_predicts_a_prompt_token(samples_of: Callable[..., Samples]) -> None:
    samples = samples_of([answer([10, 11, 12], [12, EOS])])
    assert len(samples) == 2
    assert [ENTRIES[e] for e in samples.entries.tolist()] == [(12,), (EOS,)]


def test_followers_stand_behind_the_longest_entry(samples_of: Callable[..., Samples]) -> None:
    """Entries 0 to 3 may follow: 12 behind [10, 11], then [10] behind 12, then other text behind that."""
    output = [10, 11, 12, 10, 14, EOS]
    samples = samples_of([answer([5, 6], output)], num_followers=4)
    assert samples.output_ids.tolist() == output
    assert samples.entries.tolist() == [1, -1, 3, 0, 4, 5]
    assert samples.followers.tolist() == [3, -1, 0, 4, -1, -1]
    assert samples_of([answer([5, 6], output)]).followers.tolist() == [-1] * 6


def test_followers_of_a_cut_text_are_unknown_where_they_might_go_on(
    samples_of: Callable[..., Samples],
) -> None:
    """[10] may be the beginning of [10, 11], which the text was cut off from."""
    samples = samples_of([answer([5, 6], [12, 10], complete=False, key="a")], num_followers=4)
    assert samples.followers.tolist() == [-1, -1]
    samples = samples_of([answer([5, 6], [13, 12, 50, 50], complete=False, key="a")], num_followers=4)
    assert samples.followers.tolist()[:2] == [3, 4]


def test_deepest_node_may_lie_below_the_longest_entry(samples_of: Callable[..., Samples]) -> None:
    samples = samples_of([answer([5], [50, 10, 11, 12, 50, EOS])])
    trie = vocabulary().trie
    assert ENTRIES[samples.entries[1]] == (10, 11)
    assert int(trie.depths[samples.nodes[1]]) == 3


def test_cut_text_leaves_out_rows_that_might_have_gone_deeper(samples_of: Callable[..., Samples]) -> None:
    cut = samples_of([answer([5, 6], [12, 10, 11], complete=False)])
    # Row 1 reaches the end of the text inside (10, 11, 12, 13); row 0 left the trie before it.
    assert cut.is_censored.tolist() == [False, True, False]
    assert cut.trained.tolist() == [0]


def test_end_of_text_is_a_target_like_any_other(samples_of: Callable[..., Samples]) -> None:
    whole = samples_of([answer([5, 6], [12, 14, EOS])])
    assert not whole.is_censored.any()
    assert ENTRIES[whole.entries[1]] == (14, EOS)


def test_first_row_of_a_one_token_prompt_is_left_out(samples_of: Callable[..., Samples]) -> None:
    samples = samples_of([answer([5], [12, 12, EOS])])
    assert samples.trained.tolist() == [1, 2]


def test_empty_answers_are_skipped_and_counted(samples_of: Callable[..., Samples]) -> None:
    """Fault 67: nothing to learn from is no sample, and never a mean over nothing."""
    samples = samples_of([answer([5, 6], [], key="a"), answer([5, 6], [12, EOS], key="b")])
    assert samples.num_empty == 1
    assert samples.answer_lens == (2,)


def test_no_answer_at_all_is_an_error(samples_of: Callable[..., Samples]) -> None:
    with pytest.raises(ConfigError, match="no answers to learn from"):
        samples_of([answer([5, 6], [])])
    with pytest.raises(ConfigError, match="no answers to learn from"):
        samples_of([answer([5, 6], [12])], wanted=lambda _: False)


def test_states_of_any_rows_come_in_their_order(samples_of: Callable[..., Samples]) -> None:
    generator = torch.Generator().manual_seed(0)
    shards = [
        [
            Answer(
                f"{shard}-{i}", f"{shard}-{i}", "s", torch.tensor([5, 6]), torch.tensor([12] * (i + 1)),
                torch.randn(i + 1, 2, 3, generator=generator), True,
            )
            for i in range(4)
        ]
        for shard in range(3)
    ]  # fmt: skip
    wanted = {"0-1", "0-3", "1-0", "2-2", "2-3"}
    samples = samples_of(*shards, wanted=lambda a: a.key in wanted)
    expected = torch.cat([a.states for shard in shards for a in shard if a.key in wanted])
    rows = torch.randperm(len(samples), generator=generator)
    torch.testing.assert_close(samples.states(rows), expected[rows], rtol=0, atol=0)
    assert [len(r) for r in answer_rows(samples)] == [2, 4, 1, 3, 4]


def test_every_trained_row_is_drawn_once_an_epoch(samples_of: Callable[..., Samples]) -> None:
    shards = [[answer([5, 6], [12, 50, 12, EOS], key=f"{s}-{i}") for i in range(5)] for s in range(20)]
    samples = samples_of(*shards)
    first = samples.shuffled(torch.Generator().manual_seed(0))
    assert sorted(first.tolist()) == samples.trained.tolist()
    assert first.tolist() == samples.shuffled(torch.Generator().manual_seed(0)).tolist()
    assert first.tolist() != samples.shuffled(torch.Generator().manual_seed(1)).tolist()


def test_answer_that_was_recorded_twice_is_one_sample(samples_of: Callable[..., Samples]) -> None:
    samples = samples_of([answer([5, 6], [12, EOS])], [answer([5, 6], [12, EOS])])
    assert len(samples) == 2


def test_mined_vocabulary_labels_are_prefixes_of_what_follows(
    samples_of: Callable[..., Samples], tokenizer: Any, tmp_path: Path
) -> None:
    output = [*tokenizer("the man in the hat and the man in the rain")["input_ids"], EOS]
    mined = PhraseVocabulary.mine(
        [output] * 3, tokenizer, num_entries=40, criterion="count", eos_token_ids=[EOS]
    )
    write_shard(tmp_path / "shard-0-00000.safetensors", [answer([5, 6], output)])
    samples = read_samples(tmp_path, mined, lambda _: True)
    for row in samples.trained.tolist():
        ids = mined.token_ids[samples.entries[row]]
        assert tuple(output[row : row + len(ids)]) == ids
