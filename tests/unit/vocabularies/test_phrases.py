"""The vocabulary as a whole: labels, its file, and its move to another tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from paceline.errors import CheckpointError, ConfigError
from paceline.vocabularies.phrases import PhraseVocabulary
from paceline.vocabularies.token_text import token_text


@pytest.fixture(scope="session")
def end_id(byte_level: Tokenizer, end: str) -> int:
    return int(byte_level.token_to_id(end))


@pytest.fixture(scope="session")
def sequences(byte_level: Tokenizer, answers: tuple[str, ...], end_id: int) -> list[list[int]]:
    return [[*byte_level.encode(answer).ids, end_id] for answer in answers] * 2


@pytest.fixture(scope="session")
def vocabulary(byte_level: Tokenizer, sequences: list[list[int]], end_id: int) -> PhraseVocabulary:
    return PhraseVocabulary.mine(
        sequences, byte_level, num_entries=3000, eos_token_ids=[end_id], criterion="count"
    )


def made_of(*entries: tuple[int, ...]) -> PhraseVocabulary:
    """A vocabulary of given token sequences over ten tokens, token 0 ending a text."""
    return PhraseVocabulary(
        texts=tuple(str(entry) for entry in entries),
        token_ids=entries,
        counts=(1,) * len(entries),
        max_words=3,
        eos_token_ids=(0,),
        tokenizer_fingerprint="toy",
        tokenizer_size=10,
    )


def test_strings_keep_their_leading_space_and_expand_to_the_emitted_tokens(
    vocabulary: PhraseVocabulary, byte_level: Tokenizer
) -> None:
    entry = vocabulary.texts.index(" United States")
    ids = [byte_level.token_to_id(token) for token in ("ĠUn", "ited", "ĠStates")]
    assert vocabulary.entry_token_ids(entry) == tuple(ids)
    assert vocabulary.entry_text(entry) == " United States"


def test_the_label_is_the_longest_entry_that_the_text_goes_on_with(
    vocabulary: PhraseVocabulary, sequences: list[list[int]]
) -> None:
    for text in sequences[:3]:
        for position, entry in enumerate(vocabulary.label(text).tolist()):
            rest = tuple(text[position:])
            fitting = [ids for ids in vocabulary.token_ids if rest[: len(ids)] == ids]
            assert vocabulary.entry_token_ids(entry) == max(fitting, key=len)


def test_every_position_of_the_mined_text_has_a_label(
    vocabulary: PhraseVocabulary, sequences: list[list[int]]
) -> None:
    assert all((vocabulary.label(text) >= 0).all() for text in sequences)


def test_a_position_without_an_entry_has_no_label() -> None:
    assert made_of((1, 2), (3,)).label([1, 3, 1, 2, 4]).tolist() == [-1, 1, 0, -1, -1]


def test_a_label_never_reaches_past_the_text() -> None:
    assert made_of((1,), (1, 2)).label([1, 2, 1]).tolist() == [1, -1, 0]


def test_the_deepest_node_goes_beyond_the_label() -> None:
    vocabulary = made_of((1,), (1, 2, 3))
    text = [1, 2, 4]
    assert vocabulary.label(text).tolist() == [0, -1, -1]
    assert vocabulary.trie.depths[vocabulary.deepest_node(text)[0]] == 2


def test_the_end_of_a_text_can_be_drafted(vocabulary: PhraseVocabulary, end: str, end_id: int) -> None:
    assert (end_id,) in vocabulary.token_ids
    assert vocabulary.label([end_id]).tolist() == [vocabulary.token_ids.index((end_id,))]
    assert any(text.endswith(end) and text != end for text in vocabulary.texts)
    assert not any(end_id in ids[:-1] for ids in vocabulary.token_ids)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 9), max_size=30))
def test_labels_are_prefixes_of_what_follows(text: list[int]) -> None:
    vocabulary = made_of((0,), (1,), (1, 2), (1, 2, 3, 0), (4, 4), (5, 6, 7))
    for position, entry in enumerate(vocabulary.label(text).tolist()):
        if entry >= 0:
            ids = vocabulary.entry_token_ids(entry)
            assert tuple(text[position : position + len(ids)]) == ids


def test_mining_refuses_senseless_arguments(byte_level: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="max_words is 6"):
        PhraseVocabulary.mine([[1, 2]], byte_level, max_words=6)
    with pytest.raises(ConfigError, match="num_entries is 0"):
        PhraseVocabulary.mine([[1, 2]], byte_level, num_entries=0)
    with pytest.raises(ConfigError, match="criterion is 'best'"):
        PhraseVocabulary.mine([[1, 2]], byte_level, criterion="best")  # type: ignore[arg-type]


def test_the_end_ids_default_to_the_tokenizers_own(
    byte_level: Tokenizer, sequences: list[list[int]], end: str, end_id: int
) -> None:
    wrapped = PreTrainedTokenizerFast(tokenizer_object=byte_level, eos_token=end)
    assert PhraseVocabulary.mine(sequences, wrapped).eos_token_ids == (end_id,)


def test_num_entries_is_a_limit(byte_level: Tokenizer, sequences: list[list[int]]) -> None:
    assert len(PhraseVocabulary.mine(sequences, byte_level, num_entries=20)) == 20


def test_progress_reports_every_stage(byte_level: Tokenizer, sequences: list[list[int]]) -> None:
    lines: list[str] = []
    PhraseVocabulary.mine(sequences, byte_level, progress=lines.append)
    assert [line.split()[0] for line in lines] == ["read", "found", "chose"]


def test_a_saved_vocabulary_loads_unchanged(vocabulary: PhraseVocabulary, tmp_path: Path) -> None:
    path = tmp_path / "phrases.json"
    vocabulary.save(path)
    vocabulary.save(path)
    assert PhraseVocabulary.load(path) == vocabulary
    assert [file.name for file in tmp_path.iterdir()] == ["phrases.json"]
    assert any(map(has_lone_surrogates, vocabulary.texts)), "parts of characters are among them"


def test_a_failed_save_leaves_the_old_file(
    vocabulary: PhraseVocabulary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "phrases.json"
    path.write_text("old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        vocabulary.save(path)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("phrases.json", "old")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("max_words"), "exactly the keys"),
        (lambda d: d.update(more=1), "exactly the keys"),
        (lambda d: d.update(format_version=2), "format_version is 2"),
        (lambda d: d.update(max_words="3"), "max_words is '3'"),
        (lambda d: d.update(eos_token_ids=[10]), "eos_token_ids has token id 10"),
        (lambda d: d.update(eos_token_ids=None), "eos_token_ids is None"),
        (lambda d: d["tokenizer"].pop("size"), "keys fingerprint and size"),
        (lambda d: d["tokenizer"].update(size=-1), "size a number"),
        (lambda d: d.update(entries=[]), "at least one phrase"),
        (
            lambda d: d["entries"].append(["x", [10], 1]),
            "entry 3 has token id 10, the tokenizer has ids 0 to 9",
        ),
        (lambda d: d["entries"].append(["x", [-1], 1]), "must hold a list of token ids"),
        (lambda d: d["entries"].append(["x", [True], 1]), "must hold a list of token ids"),
        (lambda d: d["entries"].append(["x", [], 1]), "has no tokens"),
        (lambda d: d["entries"].append(["x", [5]]), r"must be \[string"),
        (lambda d: d["entries"].append(["x", [1], 1]), "listed twice"),
        (lambda d: d["entries"].append(["(1,)", [7], 1]), "listed twice"),
        (lambda d: d["entries"].append(["x", [0, 1], 1]), "runs past an end-of-text"),
    ],
)
def test_a_damaged_file_is_refused_by_name(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    path = tmp_path / "phrases.json"
    made_of((1,), (1, 2), (3, 0)).save(path)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=message) as caught:
        PhraseVocabulary.load(path)
    assert str(path) in str(caught.value)


def test_missing_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        PhraseVocabulary.load(tmp_path / "phrases.json")
    (tmp_path / "phrases.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        PhraseVocabulary.load(tmp_path / "phrases.json")
    (tmp_path / "phrases.json").write_text("[]")
    with pytest.raises(CheckpointError, match="has list"):
        PhraseVocabulary.load(tmp_path / "phrases.json")


def test_retargeting_to_the_same_tokenizer_changes_nothing_but_parts_of_characters(
    vocabulary: PhraseVocabulary, byte_level: Tokenizer, end_id: int
) -> None:
    moved = vocabulary.retarget(byte_level, eos_token_ids=[end_id])
    whole = [i for i, text in enumerate(vocabulary.texts) if text.isprintable() or text.isspace()]
    kept = dict(zip(moved.kept_entries, moved.vocabulary.texts, strict=True))
    assert all(kept[i] == vocabulary.texts[i] for i in whole if not has_lone_surrogates(vocabulary.texts[i]))
    assert moved.num_dropped == sum(map(has_lone_surrogates, vocabulary.texts))


def has_lone_surrogates(text: str) -> bool:
    return any("\udc80" <= character <= "\udcff" for character in text)


def test_retargeting_spells_the_same_strings_with_other_tokens(
    vocabulary: PhraseVocabulary, sentencepiece: Tokenizer, end: str
) -> None:
    other_end = sentencepiece.token_to_id(end)
    moved = vocabulary.retarget(sentencepiece, eos_token_ids=[other_end])
    text, new = token_text(sentencepiece), moved.vocabulary
    assert new.tokenizer_fingerprint == text.fingerprint != vocabulary.tokenizer_fingerprint
    assert [vocabulary.texts[i] for i in moved.kept_entries] == list(new.texts)
    assert all(
        text.join(ids).decode() == string for ids, string in zip(new.token_ids, new.texts, strict=True)
    )
    assert len(new) + moved.num_dropped + moved.num_merged == len(vocabulary)
    united = new.token_ids[new.texts.index(" United States")]
    # How the pieces were merged depends on ties in the training of the tokenizer; what they spell does not.
    pieces = [sentencepiece.id_to_token(i) for i in united]
    assert pieces[0].startswith("▁")
    assert "▁States" in pieces


def test_retargeting_spells_words_without_a_space_as_inside_a_text(
    vocabulary: PhraseVocabulary, sentencepiece: Tokenizer
) -> None:
    new = vocabulary.retarget(sentencepiece, eos_token_ids=[]).vocabulary
    ids = new.token_ids[new.texts.index("turn")]
    assert not sentencepiece.id_to_token(ids[0]).startswith("▁")


def test_retargeting_moves_the_end_of_a_text(
    vocabulary: PhraseVocabulary, sentencepiece: Tokenizer, end: str, end_id: int
) -> None:
    other_end = sentencepiece.token_to_id(end)
    moved = vocabulary.retarget(sentencepiece, eos_token_ids=[other_end])
    ended = [i for i, entry in enumerate(moved.kept_entries) if vocabulary.token_ids[entry][-1] == end_id]
    assert len(ended) > 1
    assert all(moved.vocabulary.token_ids[i][-1] == other_end for i in ended)
    assert moved.vocabulary.eos_token_ids == (other_end,)
    assert not any(
        end_id in ids and end_id != other_end for ids in [moved.vocabulary.token_ids[i] for i in ended]
    )


def test_entries_that_end_a_text_are_dropped_for_a_tokenizer_without_an_end(
    vocabulary: PhraseVocabulary, byte_level: Tokenizer, end: str
) -> None:
    moved = vocabulary.retarget(byte_level, eos_token_ids=[])
    assert not any(text.endswith(end) for text in moved.vocabulary.texts)
