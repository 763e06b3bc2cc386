"""Public faults, group B: masks, positions and compaction of draft trees."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from transformers import DynamicCache

from conftest import PROMPTS
from paceline.engine.generator import Generator
from paceline.engine.speculate import SpeculativeEngine
from paceline.errors import ConfigError
from paceline.heads.phrase import PhraseHeadConfig
from paceline.sampling import SamplingParameters
from paceline.sequence import Segment, Sequence
from paceline.targets.attention import additive, visibility
from paceline.targets.huggingface import HuggingFaceTarget
from paceline.testing import ReplayDrafter, tiny_model
from paceline.tree import DraftTree

NUM_NEW = 20


def sequence_of(prompt, **settings):
    parameters = SamplingParameters(**{"max_new_tokens": NUM_NEW, **settings})
    return Sequence(list(prompt), parameters, frozenset(), 256, seed=0)


def reference_cache(model, ids):
    """Layer -> (keys, values) [H, T, D] of a linear run by the model itself."""
    # Made without a configuration, this cache keeps all tokens of sliding layers as well.
    cache = DynamicCache()
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]), **{name: cache})
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def final_states(model, ids):
    """[T, D] states after the final norm, by a plain forward."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]


class HiddenRecorder(ReplayDrafter):
    """Replays, and keeps the hidden state behind every emitted token, as a draft head would."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.hidden = {}

    def observe(self, output, results):
        super().observe(output, results)
        for i, (segment, result) in enumerate(zip(output.segments, results, strict=True)):
            states = self.hidden.setdefault(segment.sequence, [])
            if result is not None:
                states += [output.hidden[output.root_row(i) + row].clone() for row in result.rows]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen2-sliding"])
def test_scattered_accepted_path_leaves_the_cache_of_a_linear_run(architecture, target_of, oracle_of):
    """Row 8: K/V, hidden states and ids equal a linear run after every round; two rows, other branches."""
    target = target_of(architecture)
    expected = {tuple(p): oracle_of(architecture, tuple(p), NUM_NEW) for p in PROMPTS[1:]}
    # One of the two is wrong at its second token, so the two paths differ in length and place.
    drafter = HiddenRecorder(expected, 3, decoys=True)
    spoilt = tuple(PROMPTS[1])
    every_other = [t if i % 2 else (t + 1) % 96 for i, t in enumerate(expected[spoilt])]
    drafter.recorded = {**expected, spoilt: every_other}
    engine = SpeculativeEngine(target, drafter)
    sequences = [sequence_of(p) for p in PROMPTS[1:]]
    for sequence in sequences:
        engine.submit(sequence)
    depths = set()
    for _ in range(4):
        outcomes = engine.round()
        depths |= {len(outcome.result.path) for outcome in outcomes}
        for sequence in sequences:
            ids = sequence.token_ids
            assert ids == [*sequence.prompt_ids, *expected[tuple(sequence.prompt_ids)]][: len(ids)]
            slot, length = target._slots[sequence], target.cached_len(sequence)
            assert length == len(ids) - 1
            for layer, (keys, values) in enumerate(reference_cache(target.model, ids)):
                for buffers, wanted in ((target.kv_cache._keys, keys), (target.kv_cache._values, values)):
                    own = buffers[layer][slot, :, :length]
                    torch.testing.assert_close(own, wanted[:, :length], atol=1e-4, rtol=1e-4)
            states = final_states(target.model, ids)[len(sequence.prompt_ids) - 1 : -1]
            own = torch.stack(drafter.hidden[sequence])
            torch.testing.assert_close(own, states, atol=1e-4, rtol=1e-3)
    assert {0, 3} <= depths
    for sequence in sequences:
        engine.release(sequence)


@pytest.mark.parametrize("num_cached", [0, 1, 37])
def test_mask_shows_each_node_the_prefix_and_its_own_ancestors(num_cached):
    """Row 10: shape (queries, cached + queries); a node sees the prefix, itself and what lies above it."""
    tree = DraftTree.from_paths(5, [[6, 7], [8], [8, 9]])
    segment = Segment(sequence_of([1]), (), tree)
    mask = visibility([segment], [num_cached], len(tree), num_cached + len(tree), None)
    assert mask.shape == (1, len(tree), num_cached + len(tree))
    assert mask[0, :, :num_cached].all()
    assert torch.equal(mask[0, :, num_cached:], tree.ancestors)
    assert tree.ancestors.sum(dim=1).tolist() == [1, 2, 3, 2, 3]


@pytest.mark.parametrize("num_pending", [0, 1, 37])
def test_mask_of_a_prompt_chunk_with_a_tree_behind_it(num_pending):
    """Row 10: an already causal chunk and the tree fit together; the chunk never sees the tree."""
    tree = DraftTree.from_paths(5, [[6, 7], [8]])
    segment = Segment(sequence_of([1]), tuple(range(num_pending)), tree)
    num_rows = num_pending + len(tree)
    mask = visibility([segment], [3], num_rows, 3 + num_rows, None)[0]
    for row in range(num_pending):
        assert mask[row].nonzero().flatten().tolist() == list(range(3 + row + 1))
    assert mask[num_pending:, : 3 + num_pending].all()
    assert torch.equal(mask[num_pending:, 3 + num_pending :], tree.ancestors)


def test_candidates_with_equal_prefixes_share_nodes():
    """Row 10: duplicate prefixes are one node, duplicate candidates add nothing."""
    tree = DraftTree.from_paths(1, [[5, 6, 7], [5, 6, 8], [5, 6, 7], [5]])
    assert tree.token_ids.tolist() == [1, 5, 6, 7, 8]
    assert tree.parents.tolist() == [-1, 0, 1, 2, 2]


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_tree_logits_equal_plain_forwards_over_each_path(prompt, target_of):
    """Row 10: what the mask means, measured on logits: wrong positions or masks rarely change the argmax."""
    target = target_of("llama")
    tree = DraftTree.from_paths(prompt[-1], [[6, 7, 3], [6, 8], [9], [9, 6, 7]])
    sequence = sequence_of(prompt)
    logits = target.forward([Segment(sequence, tuple(prompt[:-1]), tree)]).tree_logits()
    for node, path in enumerate(tree.path_table):
        ids = [*prompt[:-1], *tree.token_ids[path[path >= 0]].tolist()]
        with torch.no_grad():
            expected = target.model(input_ids=torch.tensor([ids])).logits[0, -1]
        torch.testing.assert_close(logits[node], expected, atol=1e-3, rtol=1e-4)
    target.release(sequence)


class DeepDrafter(ReplayDrafter):
    """Proposes the whole recording, whatever it was asked for, and then tokens beyond the vocabulary."""

    def propose(self, sequences, max_nodes):
        trees = []
        for sequence in sequences:
            rest = list(self.recorded[tuple(sequence.prompt_ids)][len(sequence.output_ids) :])
            trees.append(DraftTree.from_chain(sequence.last_token_id, [*rest, self.vocab_size, 5, -1]))
        return trees


@pytest.mark.parametrize("num_speculative_tokens", [0, 1, 5, 100])
def test_a_tree_deeper_than_asked_for_is_cut(num_speculative_tokens, target_of, tokenizer, oracle_of):
    """Row 11: depth beyond the budget or the room is clamped, never indexed out of range."""
    prompt = tuple(PROMPTS[1])
    expected = oracle_of("llama", prompt, NUM_NEW)
    generator = Generator(
        target_of("llama"),
        tokenizer,
        DeepDrafter({prompt: expected}, 0),
        num_speculative_tokens=num_speculative_tokens,
    )
    result = generator.generate(list(prompt), SamplingParameters(max_new_tokens=NUM_NEW))
    assert list(result.token_ids) == expected
    assert result.statistics.num_rounds == -(-NUM_NEW // (min(num_speculative_tokens, NUM_NEW - 1) + 1))


def test_phrases_longer_than_the_budget_or_shorter_than_it_are_drafted_in_part_or_whole(
    target_of, tokenizer, oracle_of, phrase_head_of
):
    """Row 11: the depth of the trie and the number of nodes asked for are independent."""
    from paceline.drafters.phrase import PhraseDrafter

    prompt = tuple(PROMPTS[2])
    expected = oracle_of("llama", prompt, NUM_NEW)
    for budget in (1, 2, 3, 150, 10_000):
        drafter = PhraseDrafter.build(target_of("llama"), phrase_head_of("llama"), budget)
        generator = Generator(target_of("llama"), tokenizer, drafter, num_speculative_tokens=budget)
        result = generator.generate(list(prompt), SamplingParameters(max_new_tokens=NUM_NEW))
        assert list(result.token_ids) == expected
        assert result.statistics.num_draft_tokens <= budget * result.statistics.num_rounds
        assert result.statistics.num_accepted_tokens > 0


def test_a_head_without_layers_is_refused_when_it_is_described():
    """Row 11: a clear error at load, not at the first draft."""
    with pytest.raises(ConfigError, match="depth is 0"):
        PhraseHeadConfig(hidden_size=8, num_entries=4, depth=0)


def test_negative_budgets_are_refused(target_of):
    """Row 11: the same for the engine."""
    with pytest.raises(ConfigError, match="num_speculative_tokens is -1"):
        SpeculativeEngine(target_of("llama"), ReplayDrafter({}, 1), num_speculative_tokens=-1)


class FixedShapeDrafter(ReplayDrafter):
    """Merges prefixes of the recorded tokens: the spec `[0], [0, 0], ...` is a chain."""

    def __init__(self, recorded, depths):
        super().__init__(recorded, max(depths, default=0))
        self.depths = depths

    def _tree(self, sequence):
        done = len(sequence.output_ids)
        rest = list(self.recorded[tuple(sequence.prompt_ids)][done:])
        return DraftTree.from_paths(sequence.last_token_id, [rest[:depth] for depth in self.depths])


@pytest.mark.parametrize("depths", [[1, 2, 3], [3], [1], [], [0]], ids=str)
def test_degenerate_trees_equal_a_chain_or_plain_decoding(depths, generator_of, oracle_of):
    """Row 12: a tree that is a chain works as a chain, an empty tree as plain decoding."""
    prompt = tuple(PROMPTS[2])
    expected = oracle_of("llama", prompt, NUM_NEW)
    parameters = SamplingParameters(max_new_tokens=NUM_NEW)
    chain = generator_of("llama", ReplayDrafter({prompt: expected}, max(depths, default=0)))
    tree = generator_of("llama", FixedShapeDrafter({prompt: expected}, depths))
    wanted, found = chain.generate(list(prompt), parameters), tree.generate(list(prompt), parameters)
    assert list(found.token_ids) == list(wanted.token_ids) == expected
    for field in ("num_rounds", "num_draft_tokens", "num_accepted_tokens", "accepted_per_position"):
        assert getattr(found.statistics, field) == getattr(wanted.statistics, field)


@pytest.fixture(scope="module", params=["llama", "gpt2", "qwen2-sliding"])
def models(request):
    """The same weights in fp32 and in half precision."""
    half = {dtype: tiny_model(request.param, dtype=dtype) for dtype in (torch.float16, torch.bfloat16)}
    return {dtype: (model, copy.deepcopy(model).float()) for dtype, model in half.items()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_half_precision_has_no_nan_and_equals_fp32_within_rounding(dtype, models):
    """Row 14: ragged batch (padding) and tree masks together in half precision; real rows equal fp32."""
    outputs = []
    tree = DraftTree.from_paths(9, [[6, 7, 3], [6, 8], [9], [9, 6, 7]])
    for model in models[dtype]:
        target = HuggingFaceTarget(model)
        segments = [Segment(sequence_of([*prompt, 9]), tuple(prompt), tree) for prompt in PROMPTS]
        segments.append(Segment(sequence_of([5, 9]), (5,), DraftTree.root_only(9)))
        first = target.forward(segments)
        assert torch.isfinite(first.hidden).all()
        outputs.append(first.tree_logits().float())
    assert torch.isfinite(outputs[0]).all()
    error = (outputs[0] - outputs[1]).norm() / outputs[1].norm()
    assert error < (0.01 if dtype == torch.float16 else 0.06)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_masks_are_one_finite_plane_without_empty_rows(dtype):
    """Row 14: causal, window and padding are combined as booleans before anything is added to a score."""
    tree = DraftTree.from_paths(9, [[6, 7], [8]])
    segments = [
        Segment(sequence_of([1, 9]), (1,), tree),
        Segment(sequence_of([9]), (), DraftTree.root_only(9)),
    ]
    for window in (None, 2):
        plane = visibility(segments, [12, 0], 5, 17, window)
        assert plane.any(dim=2).all()
        mask = additive(plane, dtype)
        assert torch.isfinite(mask).all()
        assert set(mask.unique().tolist()) == {0.0, torch.finfo(dtype).min}
        # Scores well below the range in which finfo.min - 16 is still finite.
        assert torch.isfinite(torch.softmax(mask.float() - 100.0, dim=-1)).all()
