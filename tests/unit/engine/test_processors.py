"""Every node's row equals, bit for bit, what Hugging Face's processors make of the same text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from paceline.engine.processors import build_processors, needs_processing
from paceline.errors import RequestError
from paceline.sampling import SamplingParameters
from paceline.sequence import Sequence
from paceline.tree import DraftTree

V = 12
EOS = (1, 2)
CPU = torch.device("cpu")
token = st.integers(0, V - 1)
texts = st.lists(token, max_size=10)
trees = st.lists(st.lists(token, max_size=5), max_size=5)
parameter_sets = st.builds(
    SamplingParameters,
    logit_bias=st.dictionaries(token, st.floats(-3, 3, width=32), max_size=3),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -0.7]),
    no_repeat_ngram_size=st.integers(0, 4),
    bad_words=st.lists(st.lists(token, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
    min_new_tokens=st.sampled_from([0, 3, 9]),
)


def make_sequence(prompt, output, parameters, eos=EOS) -> Sequence:
    return Sequence(list(prompt), parameters, frozenset(eos), 1000, 0, output_ids=list(output))


def node_texts(tree: DraftTree) -> list[list[int]]:
    """Drafted tokens on the path to every node."""
    return [tree.token_ids[row[row >= 0]].tolist()[1:] for row in tree.path_table]


def processed(sequence: Sequence, tree: DraftTree, logits: torch.Tensor) -> torch.Tensor:
    logits = logits.clone()
    for processor in build_processors(sequence, V, CPU):
        processor.apply(logits, tree, sequence)
    return logits


def reference_row(row: torch.Tensor, prompt, output, parameters: SamplingParameters) -> torch.Tensor:
    """What plain decoding makes of one row after prompt and output, by Hugging Face's processors."""
    ids, scores = torch.tensor([[*prompt, *output]]), row[None].clone()
    first = LogitsProcessorList()
    if parameters.logit_bias:
        bias = {(i,): float(amount) for i, amount in parameters.logit_bias.items()}
        first.append(SequenceBiasLogitsProcessor(bias))
    if parameters.repetition_penalty != 1:
        first.append(RepetitionPenaltyLogitsProcessor(parameters.repetition_penalty))
    scores = first(ids, scores)
    # OpenAI: logit - count * frequency - (count > 0) * presence.
    counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=V).float()
    scores = scores - (counts * parameters.frequency_penalty + (counts > 0) * parameters.presence_penalty)
    second = LogitsProcessorList()
    if parameters.no_repeat_ngram_size:
        second.append(NoRepeatNGramLogitsProcessor(parameters.no_repeat_ngram_size))
    words = [list(word) for word in parameters.bad_words]
    if any(word not in [[i] for i in EOS] for word in words):
        second.append(NoBadWordsLogitsProcessor(words, list(EOS)))
    if parameters.min_new_tokens:
        second.append(MinNewTokensLengthLogitsProcessor(len(prompt), parameters.min_new_tokens, list(EOS)))
    return second(ids, scores)[0]


@settings(deadline=None, max_examples=150)
@given(st.lists(token, min_size=3, max_size=8), texts, texts, trees, parameter_sets, st.integers(0, 2**31))
def test_rows_equal_hugging_face_on_each_node_s_text(prompt, before, emitted, paths, parameters, seed):
    sequence = make_sequence(prompt, before, parameters)
    processors = build_processors(sequence, V, CPU)
    # The second part of the output arrives after the processors were made, as in decoding.
    sequence.output_ids += emitted
    for processor in processors:
        processor.extend(tuple(emitted))
    tree = DraftTree.from_paths(sequence.last_token_id, paths)
    around = torch.randn(len(tree) + 2, V, generator=torch.Generator().manual_seed(seed))
    raw = around.clone()
    for processor in processors:
        processor.apply(around[1:-1], tree, sequence)
    for node, path in enumerate(node_texts(tree)):
        expected = reference_row(raw[node + 1], prompt, sequence.output_ids + path, parameters)
        assert torch.equal(around[node + 1], expected)
    assert torch.equal(around[[0, -1]], raw[[0, -1]])


@settings(deadline=None, max_examples=50)
@given(st.lists(token, min_size=4, max_size=4), st.lists(token, min_size=1, max_size=6), parameter_sets)
def test_drafted_and_committed_text_give_the_same_bits(prompt, output, parameters):
    row = torch.randn(1, V, generator=torch.Generator().manual_seed(7))
    committed = make_sequence(prompt, output, parameters)
    drafted = make_sequence(prompt, [], parameters)
    chain = DraftTree.from_chain(prompt[-1], output)
    expected = processed(committed, DraftTree.root_only(output[-1]), row)
    assert torch.equal(processed(drafted, chain, row.expand(len(chain), V))[-1:], expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"logit_bias": {3: 1.0}},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -2.0},
        {"bad_words": ((3,),)},
        {"no_repeat_ngram_size": 1},
        {"min_new_tokens": 5},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_option_alone_changes_logits(changes):
    parameters = replace(SamplingParameters(), **changes)
    assert needs_processing(parameters)
    sequence = make_sequence([4, 5], [3, 3], parameters)
    logits = torch.ones(1, V)
    assert not torch.equal(processed(sequence, DraftTree.root_only(3), logits), logits)


def test_plain_requests_have_no_processors():
    assert not needs_processing(SamplingParameters(temperature=0.7, top_k=5))
    assert build_processors(make_sequence([1], [], SamplingParameters()), V, CPU) == []


def test_frequency_penalty_counts_every_occurrence_on_the_path():
    sequence = make_sequence([4], [3], SamplingParameters(frequency_penalty=1.0, presence_penalty=0.25))
    rows = processed(sequence, DraftTree.from_chain(3, [3, 4, 3]), torch.zeros(4, V))
    assert rows[:, 3].tolist() == [-1.25, -2.25, -2.25, -3.25]
    assert rows[:, 4].tolist() == [0, 0, -1.25, -1.25]  # the prompt's 4 does not count


def test_eos_is_banned_per_node_until_enough_tokens_are_out():
    sequence = make_sequence([4], [3, 3], SamplingParameters(min_new_tokens=4))
    rows = processed(sequence, DraftTree.from_paths(3, [[5, 6, 7], [8]]), torch.zeros(5, V))
    is_banned = rows[:, EOS[0]] == float("-inf")
    # Nodes: root, 5, 6, 7, 8; after 5 or 8 there are 3 tokens, after 6 there are 4.
    assert is_banned.tolist() == [True, True, False, False, True]
    assert torch.equal(rows[:, EOS[1]], rows[:, EOS[0]])
    assert bool((rows[:, 3:] == 0).all())


def test_bad_word_may_begin_in_the_prompt_and_fill_the_whole_text():
    sequence = make_sequence([4], [], SamplingParameters(bad_words=((4, 5), (3, 4, 6))))
    row = processed(sequence, DraftTree.root_only(4), torch.zeros(1, V))[0]
    assert (row == float("-inf")).nonzero()[:, 0].tolist() == [5]


def test_lone_eos_is_not_a_bad_word():
    parameters = SamplingParameters(bad_words=((EOS[0],),))
    assert build_processors(make_sequence([4], [], parameters), V, CPU) == []


def test_min_new_tokens_without_eos_does_nothing():
    parameters = SamplingParameters(min_new_tokens=5)
    assert build_processors(make_sequence([4], [], parameters, eos=()), V, CPU) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logit_bias": {V: 1.0}}, r"logit_bias has token id 12: ids of this target are 0 to 11"),
        ({"bad_words": ((3, -1),)}, r"bad_words has token id -1"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(changes, message):
    with pytest.raises(RequestError, match=message):
        build_processors(make_sequence([4], [], SamplingParameters(**changes)), V, CPU)
