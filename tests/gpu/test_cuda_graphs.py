"""CUDA graphs on a real device: the ids of `generate`, eager logits, and how often a round waits."""

from __future__ import annotations

import warnings
from functools import cache

import pytest
import torch

from conftest import PROMPTS
from paceline.drafters.none import NoDrafter
from paceline.drafters.phrase import PhraseDrafter
from paceline.drafters.prompt_lookup import PromptLookupDrafter
from paceline.engine.forward_cost import measure
from paceline.engine.generator import Generator
from paceline.heads.checkpoint import LoadedHead
from paceline.heads.phrase import PhraseHead, PhraseHeadConfig
from paceline.sampling import SamplingParameters
from paceline.sequence import Segment, Sequence
from paceline.targets.huggingface import HuggingFaceTarget
from paceline.testing import TINY_ARCHITECTURES, ReplayDrafter, greedy_oracle, tiny_model
from paceline.tree import DraftTree, check_tree
from paceline.vocabularies.phrases import PhraseVocabulary
from paceline.vocabularies.trie import TokenTrie

NUM_NEW = 24
GREEDY = SamplingParameters(max_new_tokens=NUM_NEW)
ARCHITECTURES = sorted(set(TINY_ARCHITECTURES) - {"gpt2-short"})
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _exact_products():
    """fp32 is fp32: rounded products would turn near-ties."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@cache
def model_of(architecture, dtype=torch.float32, **settings):
    return tiny_model(architecture, dtype=dtype, **settings).to(CUDA)


@cache
def target_of(architecture, dtype=torch.float32):
    return HuggingFaceTarget(model_of(architecture, dtype), execution="fast")


@cache
def expected_of(architecture):
    return {tuple(p): greedy_oracle(model_of(architecture), p, NUM_NEW) for p in PROMPTS}


@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_ids_are_those_of_the_oracle(architecture, batch_size, tokenizer):
    target, expected = target_of(architecture), expected_of(architecture)
    assert target.execution == "fast"
    ragged = {**expected, tuple(PROMPTS[1]): [0] * NUM_NEW}
    drafters = [
        NoDrafter(),
        PromptLookupDrafter.build(target, None, 8),
        ReplayDrafter(expected, 3, wrong=2),
        ReplayDrafter(ragged, 4, decoys=True),
    ]
    for drafter in drafters:
        generator = Generator(
            target, tokenizer, drafter, num_speculative_tokens=16, max_batch_size=batch_size
        )
        results = generator.generate_batch(PROMPTS, GREEDY)
        assert [list(r.token_ids) for r in results] == [expected[tuple(p)] for p in PROMPTS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "mistral-sliding", "gpt2"])
def test_states_are_those_of_the_eager_path(architecture, dtype):
    """Captured, and replayed with other values; hidden states and layer inputs."""
    targets = (
        HuggingFaceTarget(model_of(architecture, dtype)),
        HuggingFaceTarget(model_of(architecture, dtype), execution="fast"),
    )
    trees = [
        DraftTree.from_paths(9, [[20, 21, 22], [20, 30], [40, 41]]),
        DraftTree.from_chain(9, [50, 51, 52, 53, 54, 55]),
    ]
    outputs = []
    for target in targets:
        sequences = [Sequence(list(p), GREEDY, frozenset(), 256, seed=0) for p in PROMPTS[1:]]
        for sequence in sequences:
            target.forward([Segment(sequence, tuple(sequence.prompt_ids), None)])
        found = []
        for order in (trees, trees[::-1]):
            segments = [Segment(s, (), tree) for s, tree in zip(sequences, order, strict=True)]
            output = target.forward(segments, (0, 1))
            found += [output.hidden, output.features[0], output.features[1], output.tree_logits()]
        outputs.append(found)
    tolerance = 1e-3 if dtype == torch.float32 else 0.1
    for ours, reference in zip(*outputs, strict=True):
        error = (ours.float() - reference.float()).norm() / reference.float().norm()
        assert float(error) < tolerance


def test_the_cache_grows_and_graphs_are_captured_anew(tokenizer):
    model = model_of("llama", max_position_embeddings=4096)
    target = HuggingFaceTarget(model, execution="fast")
    prompt = [(11 * i * i + 3 * i) % 93 + 3 for i in range(880)]
    long = SamplingParameters(max_new_tokens=60)
    expected = [
        list(Generator(HuggingFaceTarget(model), tokenizer, NoDrafter()).generate(p, long).token_ids)
        for p in (prompt, PROMPTS[1])
    ]
    generation = target.kv_cache.generation
    results = Generator(target, tokenizer, NoDrafter()).generate_batch([prompt, PROMPTS[1]], long)
    assert [list(r.token_ids) for r in results] == expected
    assert target.kv_cache.generation > generation


def test_a_forward_that_waits_for_the_device_stays_eager(tokenizer):
    """And the device is still usable after the capture that failed."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    model = tiny_model("llama", rope_parameters=rope).to(CUDA)
    target = HuggingFaceTarget(model, execution="auto")
    assert target.execution == "eager"
    assert "cannot be captured" in target.eager_reason
    result = Generator(target, tokenizer, NoDrafter()).generate(PROMPTS[1], GREEDY)
    assert list(result.token_ids) == greedy_oracle(model, PROMPTS[1], NUM_NEW)


def phrase_drafter(target, tokenizer):
    texts = [expected_of("llama")[tuple(p)] for p in PROMPTS]
    vocabulary = PhraseVocabulary.mine(texts * 2, tokenizer, num_entries=100, criterion="count")
    torch.manual_seed(0)
    head = PhraseHead(PhraseHeadConfig(target.hidden_size, len(vocabulary), width=16)).eval()
    provenance = {"target_fingerprint": target.fingerprint}
    return PhraseDrafter(target, LoadedHead(head, vocabulary, head.config, provenance))


@pytest.mark.parametrize(
    ("drafter", "verifier", "allowed"),
    [
        ("none", "greedy", 1),
        ("prompt_lookup", "greedy", 1),
        ("prompt_lookup", "budgeted", 1),
        ("prompt_lookup", "margin", 1),
        ("prompt_lookup", "typical", 2),
        ("phrase", "greedy", 2),
    ],
)
def test_a_round_waits_for_the_device_as_often_as_documented(drafter, verifier, allowed, tokenizer):
    """Once for the verdict, and once for a tree that is drafted on the device or for typical acceptance."""
    target = target_of("llama")
    drafters = {
        "none": lambda: NoDrafter(),
        "prompt_lookup": lambda: PromptLookupDrafter.build(target, None, 8),
        "phrase": lambda: phrase_drafter(target, tokenizer),
    }
    generator = Generator(
        target, tokenizer, drafters[drafter](), verifier=verifier, num_speculative_tokens=12
    )
    answers = [generator.open(list(p), GREEDY) for p in PROMPTS[:2]]
    counts = []
    while generator.engine.has_work:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                generator.engine.round()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        counts.append(sum("synchronizing" in str(w.message) for w in caught))
    assert all(answer.sequence.is_finished for answer in answers)
    # Prompts come first; then some rounds are captures.
    assert sorted(counts[1:])[len(counts) // 2] <= allowed


def test_phrases_chosen_on_the_device_are_those_chosen_on_the_host():
    entries = sorted({tuple((7 * i + j * j) % 23 for j in range(1 + i % 4)) for i in range(400)})
    trie = TokenTrie(entries)
    probabilities = torch.softmax(3 * torch.randn(3, len(entries), dtype=torch.float64), dim=1)
    for ours, reference in zip(
        trie.most_valuable(probabilities.to(CUDA), 40), trie.most_valuable(probabilities, 40), strict=True
    ):
        assert ours.nodes.tolist() == reference.nodes.tolist()
        torch.testing.assert_close(ours.values, reference.values)
        check_tree(DraftTree.from_trie_mass(1, trie.token_ids, trie.parents, ours.values, ours.nodes))


def test_costs_are_measured_without_the_time_of_captures():
    cost = measure(target_of("llama"))
    assert len(cost.widths) > 6
    assert max(cost.measured) < 10 * min(cost.measured)
