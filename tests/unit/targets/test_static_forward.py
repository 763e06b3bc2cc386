"""Captured forwards against eager ones, round by round; what happens when a model cannot be captured."""

from __future__ import annotations

import random

import pytest
import torch

from graph_stand_ins import RecordedGraphs, Uncaptured
from paceline.errors import IncompatibleModelError, UnsupportedFeatureError
from paceline.sampling import SamplingParameters
from paceline.sequence import Segment, Sequence, VerifyResult
from paceline.targets import static_forward
from paceline.targets.buckets import MAX_WIDTH, WIDTHS
from paceline.targets.huggingface import HuggingFaceTarget
from paceline.targets.probe import check_rounds, check_target, reference_logits
from paceline.testing import TINY_VOCAB, tiny_model
from paceline.tree import DraftTree

ARCHITECTURES = ("llama", "llama-wide-heads", "mistral-sliding", "qwen2-sliding", "gemma2", "gemma3", "gpt2")
STAND_INS = {"uncaptured": Uncaptured, "recorded": RecordedGraphs}


MODELS = {}


def model_of(architecture, **settings):
    """Made once."""
    key = repr((architecture, settings))
    if key not in MODELS:
        MODELS[key] = tiny_model(architecture, **settings)
    return MODELS[key]


def static_target(architecture="llama", graphs=None, execution="fast", **settings):
    graphs = graphs or RecordedGraphs()
    return HuggingFaceTarget(model_of(architecture, **settings), execution=execution, graphs=graphs)


def sequence_of(ids, context_len=256):
    return Sequence(list(ids), SamplingParameters(), frozenset(), context_len, seed=0)


def random_ids(rng, length):
    return [rng.randrange(3, TINY_VOCAB) for _ in range(length)]


def random_tree(rng, root, num_nodes):
    """Of exactly `num_nodes` drafted nodes."""
    tree, paths = DraftTree.root_only(root), []
    while tree.num_draft_tokens < num_nodes:
        above = rng.choice(paths)[: rng.randrange(4)] if paths else []
        paths.append([*above, *random_ids(rng, rng.randrange(1, 5))])
        tree = DraftTree.from_paths(root, paths)
    return tree.take(num_nodes)


class Twins:
    """The same sequences on an eager and on a static target, fed the same and compared at every step."""

    def __init__(self, static, *, features=()):
        self.eager = HuggingFaceTarget(static.model)
        self.static = static
        self.features = features
        self.pairs = []

    @property
    def targets(self):
        return self.eager, self.static

    def add(self, ids, context_len=256):
        pair = (sequence_of(ids, context_len), sequence_of(ids, context_len))
        self.pairs.append(pair)
        if len(ids) > 1:
            self.compare([pair], [tuple(ids[:-1])], [None])
        return pair

    def compare(self, pairs, prefixes, trees):
        outputs = []
        for number, target in enumerate(self.targets):
            segments = [
                Segment(pair[number], prefix, tree)
                for pair, prefix, tree in zip(pairs, prefixes, trees, strict=True)
            ]
            outputs.append(target.forward(segments, self.features))
        eager, static = outputs
        wanted = [eager.hidden, *(eager.features[layer] for layer in self.features)]
        found = [static.hidden, *(static.features[layer] for layer in self.features)]
        for ours, reference in zip(found, wanted, strict=True):
            assert ours.shape == reference.shape
            error = (ours - reference).norm(dim=1) / reference.norm(dim=1).clamp(min=1e-6)
            assert float(error.max()) < 1e-4
        return static

    def round(self, pairs, trees, rng):
        """Verify trees, then keep a random path of each and a random next token."""
        output = self.compare(pairs, [()] * len(pairs), trees)
        for pair, tree in zip(pairs, trees, strict=True):
            table = tree.path_table[rng.randrange(len(tree))]
            path = tuple(table[table > 0].tolist())
            result = VerifyResult(
                path, tuple(tree.token_ids[list(path)].tolist()), rng.randrange(3, TINY_VOCAB)
            )
            for sequence, target in zip(pair, self.targets, strict=True):
                sequence.output_ids.extend(result.emitted_ids)
                target.commit(sequence, result)
                assert target.cached_len(sequence) == len(sequence) - 1
        return output

    def release(self, pair):
        self.pairs.remove(pair)
        for sequence, target in zip(pair, self.targets, strict=True):
            target.release(sequence)


@pytest.mark.parametrize("stand_in", STAND_INS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rounds_equal_eager_ones(architecture, stand_in):
    """Ragged starts, trees and orders; sequences that come and go; some rounds leave a sequence out."""
    graphs = STAND_INS[stand_in]()
    twins = Twins(static_target(architecture, graphs), features=(0, 1))
    rng = random.Random(7)
    for length in (1, 5, 23):
        twins.add(random_ids(rng, length))
    for number in range(12):
        if number == 4:
            twins.add(random_ids(rng, 11))
        if number == 8:
            twins.release(twins.pairs[0])
        pairs = rng.sample(twins.pairs, rng.randrange(1, len(twins.pairs) + 1))
        trees = [random_tree(rng, pair[0].last_token_id, rng.choice([0, 0, 2, 6, 13])) for pair in pairs]
        twins.round(pairs, trees, rng)
    assert 3 < graphs.num_captures < 14


@pytest.mark.parametrize("width", [*WIDTHS, *(width + 1 for width in WIDTHS[:-1])])
def test_every_width_is_padded_to_its_bucket(width):
    twins, rng = Twins(static_target()), random.Random(width)
    pairs = [twins.add(random_ids(rng, length)) for length in (3, 9)]
    for _ in range(2):
        trees = [
            random_tree(rng, pair[0].last_token_id, n) for pair, n in zip(pairs, (width - 1, 1), strict=True)
        ]
        assert len(trees[0]) == width
        twins.round(pairs, trees, rng)


def test_trees_wider_than_every_bucket_go_the_eager_way():
    graphs = RecordedGraphs()
    twins, rng = Twins(static_target(graphs=graphs)), random.Random(0)
    pair = twins.add(random_ids(rng, 3))
    before = graphs.num_replays
    twins.round([pair], [random_tree(rng, pair[0].last_token_id, MAX_WIDTH)], rng)
    assert graphs.num_replays == before


def test_a_captured_forward_is_replayed_right_after_others_were():
    graphs = RecordedGraphs()
    twins, rng = Twins(static_target("gemma3", graphs)), random.Random(1)
    pairs = [twins.add(random_ids(rng, length)) for length in (2, 6, 4)]
    for _ in range(4):
        for chosen, num_nodes in ((pairs[:1], 3), (pairs, 6), (pairs[1:2], 0), (pairs[:2], 14)):
            trees = [random_tree(rng, pair[0].last_token_id, num_nodes) for pair in chosen]
            twins.round(chosen, trees, rng)
    # Two of the check at load time, and four shapes, one of which the check has met.
    assert graphs.num_captures <= 6
    assert graphs.num_forgotten <= 2


def test_a_growing_cache_is_captured_anew():
    """The buffers move: a replay would write to memory that is not the cache any more."""
    graphs = RecordedGraphs()
    target = static_target("llama", graphs, max_position_embeddings=4096)
    twins, rng = Twins(target), random.Random(2)
    first = twins.add(random_ids(rng, 600), 4096)
    capacity = target.kv_cache.capacity
    for _ in range(6):
        twins.round([first], [random_tree(rng, first[0].last_token_id, 12)], rng)
    second = twins.add(random_ids(rng, 1100), 4096)
    assert target.kv_cache.capacity > capacity
    assert target.kv_cache.num_slots == 2
    for _ in range(3):
        trees = [random_tree(rng, pair[0].last_token_id, 12) for pair in (first, second)]
        twins.round([first, second], trees, rng)
        twins.round([first], [DraftTree.root_only(first[0].last_token_id)], rng)
    assert graphs.num_forgotten == 1


def test_too_many_captured_forwards_are_dropped(monkeypatch):
    monkeypatch.setattr(static_forward, "MAX_GRAPHS", 3)
    graphs = RecordedGraphs()
    twins, rng = Twins(static_target(graphs=graphs)), random.Random(3)
    pair = twins.add(random_ids(rng, 3))
    for num_nodes in (0, 1, 3, 7, 11, 15, 0, 3, 7):
        twins.round([pair], [random_tree(rng, pair[0].last_token_id, num_nodes)], rng)
        assert twins.static._static.num_graphs <= 3
    assert graphs.num_forgotten >= 2


def cached_rows(target, sequence):
    """Keys and values of a sequence's cached tokens, all layers."""
    slot, length = target._slots[sequence], target.cached_len(sequence)
    return [buffer[:, slot, :, :length].clone() for buffer in target.kv_cache._buffers.values()]


def test_padding_leaves_the_texts_of_others_alone():
    """Slots without a tree are rows of the batch all the same; even one filled to the last position."""
    target, rng = static_target(max_position_embeddings=4096), random.Random(4)
    resting = [sequence_of(random_ids(rng, length), 4096) for length in (895, 30, 12)]
    for sequence in resting:
        target.forward([Segment(sequence, tuple(sequence.prompt_ids), None)])
    assert target.kv_cache.tail == 1024 - MAX_WIDTH == target.cached_len(resting[0])
    busy = sequence_of(random_ids(rng, 5), 4096)
    target.forward([Segment(busy, tuple(busy.prompt_ids[:-1]), None)])
    before = [cached_rows(target, sequence) for sequence in resting]
    for num_nodes in (0, 3, 20, 90):
        target.forward([Segment(busy, (), random_tree(rng, busy.last_token_id, num_nodes))])
    for sequence, rows in zip(resting, before, strict=True):
        for was, now in zip(rows, cached_rows(target, sequence), strict=True):
            assert torch.equal(was, now)


def test_another_forward_before_the_commit_does_no_harm():
    """Trees of two sequences are verified one after the other and committed afterwards."""
    twins, rng = Twins(static_target("mistral-sliding")), random.Random(5)
    pairs = [twins.add(random_ids(rng, length)) for length in (6, 9)]
    trees = [random_tree(rng, pair[0].last_token_id, 6) for pair in pairs]
    for pair, tree in zip(pairs, trees, strict=True):
        twins.compare([pair], [()], [tree])
    for pair, tree in zip(pairs, trees, strict=True):
        path = tuple(tree.path_table[-1][tree.path_table[-1] > 0].tolist())
        result = VerifyResult(path, tuple(tree.token_ids[list(path)].tolist()), 9)
        for sequence, target in zip(pair, twins.targets, strict=True):
            sequence.output_ids.extend(result.emitted_ids)
            target.commit(sequence, result)
    twins.round(pairs, [random_tree(rng, pair[0].last_token_id, 4) for pair in pairs], rng)


def test_what_a_forward_returned_stays_when_the_next_one_runs():
    target, rng = static_target(), random.Random(6)
    sequence = sequence_of([5, 6, 7])
    target.forward([Segment(sequence, (5, 6), None)])
    output = target.forward([Segment(sequence, (), random_tree(rng, 7, 6))], (1,))
    kept = [output.hidden.clone(), output.features[1].clone()]
    target.forward([Segment(sequence, (), random_tree(rng, 7, 6))], (1,))
    target.forward([Segment(sequence, (), random_tree(rng, 7, 0))], (1,))
    assert torch.equal(output.hidden, kept[0])
    assert torch.equal(output.features[1], kept[1])


def test_other_layers_are_another_capture():
    graphs = RecordedGraphs()
    twins, rng = Twins(static_target(graphs=graphs)), random.Random(10)
    pair = twins.add(random_ids(rng, 5))
    for features in ((), (1,), (0, 1), ()):
        twins.features = features
        twins.round([pair], [random_tree(rng, pair[0].last_token_id, 3)], rng)
    # Two of the check, and one for each new set of layers at a width that the check has not met.
    assert graphs.num_captures == 5


@pytest.mark.parametrize("architecture", ["gpt2-short", "llama"])
def test_padding_stays_inside_the_context(architecture):
    """At the last position of a context, a padded row has no position of its own to stand at."""
    context_len = 32 if architecture == "gpt2-short" else 256
    twins, rng = Twins(static_target(architecture)), random.Random(8)
    pair = twins.add(random_ids(rng, context_len - 2), context_len)
    other = twins.add(random_ids(rng, 4), context_len)
    for _ in range(2):
        trees = [DraftTree.root_only(pair[0].last_token_id), random_tree(rng, other[0].last_token_id, 5)]
        twins.round([pair, other], trees, rng)


def test_the_host_may_change_its_lists_after_a_forward_was_asked_for():
    """Nothing of a round is read from the segments once it is staged: the same graph, other values."""
    graphs = RecordedGraphs()
    target = static_target(graphs=graphs)
    sequence = sequence_of([5, 6, 7])
    target.forward([Segment(sequence, (5, 6), None)])
    tree = DraftTree.from_chain(7, [8, 9])
    first = target.forward([Segment(sequence, (), tree)]).hidden
    captures = graphs.num_captures
    tree.token_ids[1:] = torch.tensor([40, 41])
    second = target.forward([Segment(sequence, (), DraftTree.from_chain(7, [40, 41]))]).hidden
    assert graphs.num_captures == captures
    assert torch.equal(first[0], second[0])
    assert not torch.allclose(first[1], second[1])


def test_a_forward_that_waits_for_the_device_is_not_captured():
    """Rotary frequencies that grow with the text are chosen by the host: `auto` goes the eager way."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    target = static_target(execution="auto", rope_parameters=rope)
    assert target.execution == "eager"
    assert "cannot be captured" in target.eager_reason
    assert "not permitted when stream is capturing" in target.eager_reason
    assert not target._slots
    with pytest.raises(
        UnsupportedFeatureError, match="execution 'fast': the forward of LlamaModel cannot be"
    ):
        static_target(execution="fast", rope_parameters=rope)


def test_a_number_of_the_host_inside_a_capture_is_found_by_the_check():
    """A model that takes positions from the length of its cache would repeat those of the capture."""
    model = tiny_model("llama")

    def own_positions(module, args, kwargs):
        past = kwargs.get("cache", kwargs.get("past_key_values"))
        length = past.get_seq_length() if past is not None else 0
        if kwargs.get("position_ids") is not None and past is not None:
            kwargs["position_ids"] = kwargs["position_ids"] * 0 + length
        return args, kwargs

    model.model.register_forward_pre_hook(own_positions, with_kwargs=True)
    target = HuggingFaceTarget(model, execution="auto", graphs=RecordedGraphs(), check=False)
    assert target.execution == "eager"
    assert "is rounding" in target.eager_reason


def test_a_number_that_was_right_at_capture_is_found_by_a_round_from_elsewhere():
    """The first round agrees, since the number is its own; the check feeds another one."""
    target = static_target(graphs=RecordedGraphs(), intermediate_size=48)

    def own_positions(module, args, kwargs):
        if target._cached:
            positions = kwargs["position_ids"]
            [start] = target._cached.values()
            kwargs["position_ids"] = positions - positions[:, :1] + start
        return args, kwargs

    target.model.model.register_forward_pre_hook(own_positions, with_kwargs=True)
    target._static._forget()
    reference = reference_logits(target)
    check_target(target, reference, in_rounds=True)
    with pytest.raises(IncompatibleModelError, match="is rounding"):
        check_rounds(target, reference)


class FailsLater(RecordedGraphs):
    """Captures three forwards, and no more."""

    def capture(self, run):
        if self.num_captures == 3:
            raise RuntimeError("operation failed due to a previous error during capture")
        return super().capture(run)


def test_a_capture_that_fails_later_leaves_the_rest_to_the_eager_way():
    twins, rng = Twins(static_target(graphs=FailsLater(), execution="auto")), random.Random(9)
    pair = twins.add(random_ids(rng, 3))
    for num_nodes, execution in ((1, "fast"), (7, "fast"), (15, "eager"), (7, "eager")):
        twins.round([pair], [random_tree(rng, pair[0].last_token_id, num_nodes)], rng)
        assert twins.static.execution == execution
    assert "previous error during capture" in twins.static.eager_reason


def test_where_captured_forwards_are_required_a_late_failure_is_an_error():
    target = static_target(graphs=FailsLater())
    sequence = sequence_of([5, 6, 7])
    target.forward([Segment(sequence, (5, 6), None)])
    target.forward([Segment(sequence, (), DraftTree.from_chain(7, [8]))])
    wide = Segment(sequence, (), DraftTree.from_chain(7, list(range(3, 18))))
    with pytest.raises(UnsupportedFeatureError, match="previous error during capture"):
        target.forward([wide])


def test_out_of_memory_is_no_reason_to_go_on():
    class Full(RecordedGraphs):
        def capture(self, run):
            raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        static_target(graphs=Full(), execution="auto")


def test_eager_execution_captures_nothing():
    graphs = RecordedGraphs()
    target = HuggingFaceTarget(model_of("llama"), execution="eager", graphs=graphs)
    assert (target.execution, target.eager_reason, graphs.num_captures) == ("eager", "chosen", 0)
    assert target.kv_cache.tail == target.kv_cache.capacity


def test_padded_rows_are_counted_as_such():
    assert static_target().pads_rows
    assert HuggingFaceTarget(model_of("llama")).pads_rows
