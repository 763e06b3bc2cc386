"""The compiled EAGLE layer against the same layer in torch, step by step and through the drafter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conftest import PROMPTS
from paceline.drafters.compiled_eagle import CompiledEagleLayer
from paceline.drafters.eagle import EagleDrafter
from paceline.drafters.eagle_cache import EagleCache, Sight
from paceline.engine.generator import Generator
from paceline.heads.eagle import EagleConfig, EagleHead
from paceline.kernels import build
from paceline.sampling import SamplingParameters
from paceline.sequence import Sequence
from paceline.vocabularies.full import FullVocabulary
from paceline.vocabularies.output_layer import OutputLayer

SIZE = 48
PLAIN = EagleConfig("eagle3", SIZE, SIZE, 80, 4, 2, 16, feature_layers=(0, 1))
SHAPES = {
    "eagle3": PLAIN,
    "eagle": replace(PLAIN, kind="eagle", feature_layers=()),
    "normed residual": replace(PLAIN, normalises_residual=True),
    "norms of heads": replace(PLAIN, normalises_heads=True, num_kv_heads=4),
    "biases": replace(PLAIN, has_attention_bias=True, has_output_bias=True, has_fusion_bias=True),
    "odd sizes": replace(PLAIN, intermediate_size=77, num_heads=3, num_kv_heads=1, head_dim=32),
    "scaled positions": replace(
        PLAIN, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                                "original_max_position_embeddings": 64},
    ),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _kernels():
    build.load_kernels()


def head_of(config: EagleConfig, dtype: torch.dtype = torch.float32) -> EagleHead:
    torch.manual_seed(0)
    head = EagleHead(config)
    for parameter in head.parameters():
        parameter.data.mul_(2.0).add_(torch.randn_like(parameter) * 0.1)
    return head.to(dtype).eval().requires_grad_(False)


def sequence_of(length: int) -> Sequence:
    return Sequence([1] * length, SamplingParameters(), frozenset(), 1000, seed=0)


class Both:
    """A layer in C++ and in torch, each with a cache of its own."""

    def __init__(self, config, dtype, num_sequences):
        self.head = head_of(config, dtype)
        self.compiled = CompiledEagleLayer.where_possible(self.head)
        assert self.compiled is not None
        self.sequences = [sequence_of(2) for _ in range(num_sequences)]
        self.caches = [
            EagleCache(config.num_kv_heads, config.head_dim, dtype, torch.device("cpu")) for _ in "ab"
        ]
        for cache in self.caches:
            cache.open(self.sequences, 64)
        self.first = 0

    def step(self, embedding, state, starts, in_order, tail):
        sight = Sight(self.sequences, starts, in_order, tail)
        # Positions count from anywhere: a cache that was taken over begins in the middle of a text.
        positions = in_order + tail.shape[2] - 1 + self.first
        visible = sight.visible
        found = self.compiled.step(embedding, state, self.caches[0], sight)
        wanted = self.head(
            embedding, state, positions, lambda q, k, v: self.caches[1].attend(sight, visible, q, k, v)
        )
        return found, wanted


def close(found, wanted, dtype):
    tolerance = 1e-4 if dtype is torch.float32 else 0.06
    for ours, theirs in ((found.final, wanted.final), (found.fed_back, wanted.fed_back)):
        scale = float(theirs.float().abs().max())
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", SHAPES)
def test_states_are_those_of_torch(name, dtype):
    """A committed text of either sequence, then two levels of a tree behind it."""
    config = SHAPES[name]
    both = Both(config, dtype, 2)
    generator = torch.Generator().manual_seed(1)

    def drawn(width):
        return torch.randn(2, width, SIZE, generator=generator).to(dtype)

    starts, width = torch.tensor([0, 0]), 7
    in_order = starts[:, None] + torch.arange(1, width + 1)
    close(*both.step(drawn(width), drawn(width), starts, in_order, in_order.new_empty(2, width, 0)), dtype)
    # The second sequence has fewer committed places than were computed: what lies behind is written over.
    lengths = torch.tensor([7, 5])
    above = torch.empty(2, 3, 0, dtype=torch.int64)
    for level in range(2):
        starts = lengths + 3 * level
        own = (starts[:, None] + torch.arange(3))[:, :, None]
        # Each node of the second level goes on from another one than its neighbour's.
        above = torch.cat([above.flip(1), own], dim=2)
        found, wanted = both.step(drawn(3), drawn(3), starts, lengths[:, None].expand(2, 3), above)
        close(found, wanted, dtype)
    ours, theirs = (cache.keys[:2, :, :11].float() for cache in both.caches)
    torch.testing.assert_close(ours, theirs, rtol=0.03, atol=1e-4 if dtype is torch.float32 else 0.06)


def test_long_chunks_go_through_at_once():
    both = Both(PLAIN, torch.float32, 1)
    for cache in both.caches:
        cache.open(both.sequences, 1300)
    width = 1200
    in_order = torch.arange(1, width + 1)[None]
    generator = torch.Generator().manual_seed(1)
    embedding, state = (torch.randn(1, width, SIZE, generator=generator) for _ in range(2))
    close(
        *both.step(embedding, state, torch.tensor([0]), in_order, in_order.new_empty(1, width, 0)),
        torch.float32,
    )


def test_only_distances_matter():
    both = Both(PLAIN, torch.float32, 1)
    both.first = 37
    generator = torch.Generator().manual_seed(1)
    embedding, state = (torch.randn(1, 9, SIZE, generator=generator) for _ in range(2))
    in_order = torch.arange(1, 10)[None]
    close(
        *both.step(embedding, state, torch.tensor([0]), in_order, in_order.new_empty(1, 9, 0)), torch.float32
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_several_threads_compute_what_torch_does(dtype):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        both = Both(PLAIN, dtype, 2)
        generator = torch.Generator().manual_seed(1)
        for _ in range(10):
            embedding, state = (torch.randn(2, 7, SIZE, generator=generator).to(dtype) for _ in range(2))
            in_order = torch.arange(1, 8).expand(2, 7)
            no_tail = in_order.new_empty(2, 7, 0)
            close(*both.step(embedding, state, torch.tensor([0, 0]), in_order, no_tail), dtype)
    finally:
        torch.set_num_threads(before)


def test_what_is_given_stays_as_it_was():
    both = Both(PLAIN, torch.float32, 1)
    embedding, state = torch.randn(1, 2, SIZE), torch.randn(1, 2, SIZE)
    before = embedding.clone(), state.clone()
    in_order = torch.tensor([[1, 2]])
    both.step(embedding, state, torch.tensor([0]), in_order, in_order.new_empty(1, 2, 0))
    assert torch.equal(embedding, before[0])
    assert torch.equal(state, before[1])


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
@pytest.mark.parametrize("shape", [{"top_k": 4, "depth": 3}, {"top_k": 1, "depth": 5}], ids=["tree", "chain"])
def test_drafts_are_those_of_torch_and_text_is_the_targets(
    target_of, tokenizer, oracle_of, monkeypatch, kind, shape
):
    target = target_of("llama")
    size = target.hidden_size
    config = EagleConfig(kind, size, size, 48, 2, 1, 16, feature_layers=(0, 1) if kind == "eagle3" else ())
    head = head_of(config)
    layer = OutputLayer(target.output_rows.weight * 3.0)
    compiled = EagleDrafter(target, head, FullVocabulary(layer), least_alive=0.0, **shape)
    assert compiled._compiled is not None
    monkeypatch.setattr(CompiledEagleLayer, "where_possible", lambda _: None)
    plain = EagleDrafter(target, head, FullVocabulary(layer), least_alive=0.0, **shape)
    assert plain._compiled is None
    asked = SamplingParameters(max_new_tokens=24)
    found = []
    for drafter in (compiled, plain):
        generator = Generator(target, tokenizer, drafter, num_speculative_tokens=24)
        results = generator.generate_batch([list(prompt) for prompt in PROMPTS], asked)
        for prompt, result in zip(PROMPTS, results, strict=True):
            assert list(result.token_ids) == oracle_of("llama", tuple(prompt), 24)
        found.append([result.statistics.num_draft_tokens for result in results])
        sequence = generator.open(list(PROMPTS[2]), asked).sequence
        generator.engine.round()
        found[-1].append(drafter.propose([sequence], 12)[0])
    assert found[0][:-1] == found[1][:-1]
    ours, theirs = found[0][-1], found[1][-1]
    assert torch.equal(ours.token_ids, theirs.token_ids)
    assert torch.equal(ours.parents, theirs.parents)
    torch.testing.assert_close(ours.node_values, theirs.node_values, rtol=1e-3, atol=1e-5)


def test_what_the_kernels_do_not_take_stays_in_torch(monkeypatch):
    assert CompiledEagleLayer.where_possible(head_of(replace(PLAIN, head_dim=24))) is None
    assert CompiledEagleLayer.where_possible(head_of(PLAIN, torch.float16)) is None
    monkeypatch.setattr(build, "_LOADED", {})
    assert CompiledEagleLayer.where_possible(head_of(PLAIN)) is None
