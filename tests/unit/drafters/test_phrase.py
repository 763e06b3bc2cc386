"""Phrase drafting on a tiny target: the right hidden state, the right tree, and the target's own text."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from conftest import PROMPTS
from paceline.drafters.phrase import CHAINED_SEQUENCES, PhraseDrafter
from paceline.engine.speculate import SpeculativeEngine
from paceline.errors import CheckpointError, ConfigError
from paceline.heads import checkpoint
from paceline.heads.checkpoint import LoadedHead, save_head
from paceline.heads.phrase import PhraseHead, PhraseHeadConfig
from paceline.sampling import SamplingParameters
from paceline.sequence import Segment, Sequence
from paceline.targets.huggingface import HuggingFaceTarget
from paceline.testing import tiny_model
from paceline.tree import check_tree
from paceline.vocabularies.phrases import PhraseVocabulary

NUM_NEW = 24


@pytest.fixture(scope="module")
def target(target_of):
    """A target of its own, with a fingerprint."""
    tiny = copy.copy(target_of("llama"))
    tiny.fingerprint = "tiny"
    return tiny


@pytest.fixture(scope="module")
def texts(oracle_of):
    """What the target writes to each prompt."""
    return [oracle_of("llama", tuple(prompt), NUM_NEW) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def vocabulary(texts, tokenizer):
    return PhraseVocabulary.mine(texts * 2, tokenizer, num_entries=200, criterion="count")


def loaded(vocabulary: PhraseVocabulary, *, fingerprint: str = "tiny", **settings: Any) -> LoadedHead:
    """A random head."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 32, "num_entries": len(vocabulary), "width": 16, **settings}
    config = PhraseHeadConfig(**shape)
    return LoadedHead(PhraseHead(config).eval(), vocabulary, config, {"target_fingerprint": fingerprint})


def sequence_of(prompt: list[int], *, context_len: int = 256) -> Sequence:
    parameters = SamplingParameters(max_new_tokens=NUM_NEW)
    return Sequence(list(prompt), parameters, frozenset(), context_len, seed=0)


def run(target: HuggingFaceTarget, drafter: PhraseDrafter, prompts: list[list[int]], **settings: Any) -> Any:
    """Decode the prompts together; returns the sequences and the outcomes of every round."""
    engine = SpeculativeEngine(target, drafter, num_speculative_tokens=12, **settings)
    sequences = [sequence_of(prompt) for prompt in prompts]
    for sequence in sequences:
        engine.submit(sequence)
    rounds = []
    while engine.has_work:
        rounds.append(engine.round())
    return sequences, rounds


def teach(head: LoadedHead, target: HuggingFaceTarget, texts: list[list[int]]) -> LoadedHead:
    """Fit a head: the state before the newest token, and that token, predict the label behind it."""
    rows, labels = [], []
    for prompt, text in zip(PROMPTS, texts, strict=True):
        ids, first = torch.tensor([*prompt, *text]), len(prompt)
        with torch.no_grad():
            states = target.model(input_ids=ids[None], output_hidden_states=True).hidden_states
            before = slice(first - 1, -2)
            features = {layer: states[layer][0, before] for layer in head.config.feature_layers}
            rows.append(
                head.head.join_inputs(states[-1][0, before], target.embedding(ids[first:-1]), features)
            )
        labels.append(head.vocabulary.label(text)[1:])
    inputs, wanted = torch.cat(rows), torch.cat(labels)
    optimizer = torch.optim.Adam(head.head.parameters(), lr=0.01)
    for _ in range(150):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(head.head(inputs), wanted, ignore_index=-1).backward()
        optimizer.step()
    return head


@pytest.mark.parametrize("prefill_chunk", [512, 10])
def test_the_text_is_the_targets_own_whatever_the_head_drafts(target, vocabulary, texts, prefill_chunk):
    sequences, _ = run(
        target, PhraseDrafter(target, loaded(vocabulary)), PROMPTS, prefill_chunk=prefill_chunk
    )
    assert [sequence.output_ids for sequence in sequences] == texts


def test_a_head_that_knows_the_text_gets_its_phrases_accepted(target, vocabulary, texts):
    head = teach(loaded(vocabulary), target, texts)
    sequences, rounds = run(target, PhraseDrafter(target, head), PROMPTS)
    assert [sequence.output_ids for sequence in sequences] == texts
    # The first round of each prompt has no hidden state yet; later ones accept a phrase each.
    later = [outcome for outcomes in rounds for outcome in outcomes if outcome.tree.num_draft_tokens]
    assert len(later) >= len(PROMPTS)
    assert sum(len(outcome.result.path) for outcome in later) / len(later) > 1.5


def test_the_head_reads_the_state_right_before_the_newest_token(target, vocabulary, texts, monkeypatch):
    drafter = PhraseDrafter(target, teach(loaded(vocabulary, feature_layers=(1,)), target, texts))
    seen: list[torch.Tensor] = []
    original = PhraseDrafter._inputs

    def record(self: PhraseDrafter, sequences: list[Sequence]) -> torch.Tensor:
        seen.append(original(self, sequences))
        return seen[-1].clone()

    monkeypatch.setattr(PhraseDrafter, "_inputs", record)
    engine = SpeculativeEngine(target, drafter, num_speculative_tokens=12)
    sequences = [sequence_of(prompt) for prompt in PROMPTS]
    for sequence in sequences:
        engine.submit(sequence)
    engine.round()
    advances = set()
    while engine.has_work:
        before = [s.token_ids for s in sequences if not s.is_finished]
        seen.clear()
        outcomes = engine.round()
        advances |= {len(outcome.result.emitted_ids) for outcome in outcomes}
        [inputs] = seen
        for row, tokens in zip(inputs, before, strict=True):
            with torch.no_grad():
                states = target.model(
                    input_ids=torch.tensor([tokens]), output_hidden_states=True
                ).hidden_states
            hidden, newest, feature = row.split(32)
            torch.testing.assert_close(hidden, states[-1][0, -2], rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(newest, target.embedding(torch.tensor(tokens[-1])))
            torch.testing.assert_close(feature, states[1][0, -2], rtol=1e-3, atol=1e-3)
    assert len(advances) > 2, "rounds of different lengths were seen"


@pytest.fixture
def observed(target, vocabulary):
    """A drafter that has seen two prompts and the tokens that followed them."""
    drafter = PhraseDrafter(target, loaded(vocabulary))
    engine = SpeculativeEngine(target, drafter, num_speculative_tokens=12)
    sequences = [sequence_of(prompt) for prompt in PROMPTS[1:]]
    for sequence in sequences:
        engine.submit(sequence)
    engine.round()
    yield drafter, sequences
    with torch.inference_mode():
        for sequence in sequences:
            engine.release(sequence)


def test_drafts_are_trees_of_phrases_rooted_at_the_newest_token(observed, vocabulary):
    drafter, sequences = observed
    beginnings = {ids[:n] for ids in vocabulary.token_ids for n in range(1, len(ids) + 1)}
    for sequence, tree in zip(sequences, drafter.propose(sequences, 30), strict=True):
        check_tree(tree)
        assert tree.num_draft_tokens == 30
        assert tree.token_ids[0] == sequence.last_token_id
        for path in tree.path_table:
            tokens = tuple(tree.token_ids[path[path >= 0]].tolist())[1:]
            assert not tokens or tokens in beginnings


def test_more_nodes_extend_the_same_draft(observed):
    drafter, sequences = observed
    [small], [large] = drafter.propose(sequences[:1], 5), drafter.propose(sequences[:1], 50)
    taken = large.take(5)
    assert torch.equal(taken.token_ids, small.token_ids)
    assert torch.equal(taken.parents, small.parents)


def test_a_batch_is_drafted_as_each_sequence_alone(observed):
    drafter, sequences = observed
    for sequence, tree in zip(sequences, drafter.propose(sequences, 20), strict=True):
        [alone] = drafter.propose([sequence], 20)
        torch.testing.assert_close(alone.node_values, tree.node_values, rtol=0.05, atol=1e-3)


def test_sequences_without_a_state_get_a_root_only(observed):
    drafter, sequences = observed
    fresh = sequence_of([5, 6, 7])
    lengths = [tree.num_draft_tokens for tree in drafter.propose([sequences[0], fresh, sequences[1]], 10)]
    assert lengths == [10, 0, 10]


def test_no_nodes_asked_for_gives_a_root_only(observed):
    drafter, sequences = observed
    assert [len(tree) for tree in drafter.propose(sequences, 0)] == [1, 1]


def test_a_released_sequence_is_forgotten(observed):
    drafter, sequences = observed
    drafter.release(sequences[0])
    drafter.release(sequences[0])
    assert [tree.num_draft_tokens for tree in drafter.propose(sequences, 10)] == [0, 10]


def test_a_state_from_inside_the_prompt_drafts_nothing(target, vocabulary):
    drafter = PhraseDrafter(target, loaded(vocabulary))
    engine = SpeculativeEngine(target, drafter, num_speculative_tokens=12, prefill_chunk=8)
    sequence = sequence_of(PROMPTS[2])
    engine.submit(sequence)
    assert engine.round() == []
    assert drafter.propose([sequence], 10)[0].num_draft_tokens == 0
    engine.release(sequence)


def test_a_state_kept_from_the_whole_prompt_but_its_last_token_drafts(target, vocabulary):
    drafter, sequence = PhraseDrafter(target, loaded(vocabulary)), sequence_of(PROMPTS[2])
    output = target.forward([Segment(sequence, tuple(PROMPTS[2][:-1]), None)])
    drafter.observe(output, [None])
    assert drafter.propose([sequence], 10)[0].num_draft_tokens == 10
    target.release(sequence)


def test_states_do_not_keep_the_forward_alive(observed):
    drafter, sequences = observed
    held = drafter._states[sequences[0]].vectors
    assert held.untyped_storage().nbytes() <= 2 * 32 * held.element_size()


def test_the_head_given_stays_as_it_was(target, vocabulary):
    head = loaded(vocabulary)
    PhraseDrafter(target, head)
    assert {parameter.dtype for parameter in head.head.parameters()} == {torch.float32}
    assert all(parameter.requires_grad for parameter in head.head.parameters())


def test_a_bf16_target_is_drafted_for(target_of, tokenizer, vocabulary):
    half = HuggingFaceTarget(tiny_model("llama", dtype=torch.bfloat16), fingerprint="tiny")
    sequences, rounds = run(half, PhraseDrafter(half, loaded(vocabulary)), PROMPTS)
    assert all(len(sequence.output_ids) == NUM_NEW for sequence in sequences)
    assert any(outcome.tree.num_draft_tokens == 12 for outcomes in rounds for outcome in outcomes)


def test_a_head_folder_is_loaded(target, vocabulary, tmp_path):
    made = loaded(vocabulary)
    save_head(tmp_path / "head", made.head, vocabulary, made.provenance, "")
    sequences, _ = run(target, PhraseDrafter.build(target, tmp_path / "head", 12), PROMPTS[:1])
    assert len(sequences[0].output_ids) == NUM_NEW


def test_the_shipped_head_is_the_default(target, vocabulary, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "PRETRAINED", tmp_path)
    with pytest.raises(ConfigError, match="no phrase head is shipped for this target"):
        PhraseDrafter.build(target, None, 12)
    made = loaded(vocabulary)
    save_head(tmp_path / "tiny-llama" / "small", made.head, vocabulary, made.provenance, "")
    assert isinstance(PhraseDrafter.build(target, None, 12), PhraseDrafter)


def test_a_head_for_another_target_of_the_same_shape_warns(target, vocabulary):
    with pytest.warns(UserWarning, match="trained for target other, this one is tiny"):
        PhraseDrafter(target, loaded(vocabulary, fingerprint="other"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PhraseDrafter(target, loaded(vocabulary))


def test_a_head_of_another_shape_is_refused(target, vocabulary):
    with pytest.raises(CheckpointError, match="width 48, the target's have 32"):
        PhraseDrafter(target, loaded(vocabulary, hidden_size=48))
    with pytest.raises(CheckpointError, match=r"reads layers \[2\], the target has layers 0 to 1"):
        PhraseDrafter(target, loaded(vocabulary, feature_layers=(0, 2)))
    foreign = replace(vocabulary, token_ids=(*vocabulary.token_ids[:-1], (96,)))
    with pytest.raises(CheckpointError, match="token id 96, the target has ids 0 to 95"):
        PhraseDrafter(target, loaded(foreign))


@pytest.mark.parametrize(
    ("num_sequences", "has_chains"), [(CHAINED_SEQUENCES, True), (CHAINED_SEQUENCES + 1, False)]
)
def test_large_batches_are_drafted_without_second_phrases(
    target, vocabulary, monkeypatch, num_sequences, has_chains
):
    drafter = PhraseDrafter(target, loaded(vocabulary, chain_entries=len(vocabulary)))
    asked = []
    draft = drafter._trees.draft

    def note(inputs, roots, max_nodes, *, has_chains):
        asked.append(has_chains)
        return draft(inputs, roots, max_nodes, has_chains=has_chains)

    monkeypatch.setattr(drafter._trees, "draft", note)
    run(target, drafter, [list(range(5 + i, 12 + i)) for i in range(num_sequences)])
    assert asked[0] == has_chains
    assert set(asked) <= {True, has_chains}
