"""Public faults, group I: shapes, rotary tables, tied and scaled heads, feature layers."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from conftest import PROMPTS
from paceline.drafters.phrase import PhraseDrafter
from paceline.engine.generator import Generator
from paceline.errors import CheckpointError, ConfigError, ShapeError
from paceline.heads.checkpoint import LoadedHead, load_head
from paceline.heads.phrase import PhraseHead, PhraseHeadConfig
from paceline.sampling import SamplingParameters
from paceline.sequence import Segment, Sequence
from paceline.targets.huggingface import HuggingFaceTarget
from paceline.testing import TINY_ARCHITECTURES, WEIGHT_SCALE, ReplayDrafter, greedy_oracle
from paceline.tree import DraftTree

BASE = TINY_ARCHITECTURES["llama"][2]


def llama(**settings):
    """A random Llama with logits that are far from flat."""
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**{**BASE, **settings})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name:
                parameter.mul_(WEIGHT_SCALE)
    return model


def sequence_of(prompt, context_len=1 << 20):
    return Sequence(list(prompt), SamplingParameters(), frozenset(), context_len, seed=0)


@pytest.mark.parametrize(("num_kv_heads", "expected"), [(1, 1), (2, 2), (4, 4), (None, 4)])
def test_head_sizes_and_key_heads_are_the_models_own(num_kv_heads, expected, tokenizer):
    """Row 57: head_dim 24 is not hidden / heads; absent key heads mean as many as query heads."""
    model = llama(head_dim=24, num_key_value_heads=num_kv_heads)
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.weight.shape == (96, 32)
    assert attention.k_proj.weight.shape == (expected * 24, 32)
    target = HuggingFaceTarget(model)
    assert target.kv_cache._keys[0].shape[1::2] == (expected, 24)
    prompt = tuple(PROMPTS[1])
    oracle = greedy_oracle(model, prompt, 16)
    generator = Generator(target, tokenizer, ReplayDrafter({prompt: oracle}, 4, wrong=3, decoys=True))
    result = generator.generate(list(prompt), SamplingParameters(max_new_tokens=16))
    assert list(result.token_ids) == oracle
    assert result.statistics.num_rounds == 4


SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_rotary_tables_of_both_spellings_agree_and_reach_the_draft():
    """Row 58: theta 100000 with llama3 scaling, as version 4 and as version 5 of transformers write it."""
    old = llama(rope_theta=100000.0, rope_scaling=dict(SCALING), max_position_embeddings=8192)
    new = llama(rope_parameters={**SCALING, "rope_theta": 100000.0}, max_position_embeddings=8192)
    plain = llama(max_position_embeddings=8192)
    states, positions = torch.zeros(1, 1, 32), torch.tensor([[5000]])
    tables = [m.model.rotary_emb(states, positions) for m in (old, new, plain)]
    for own, other, unscaled in zip(*tables, strict=True):
        assert torch.equal(own, other)
        assert not torch.allclose(own, unscaled)
    # A tree far behind the original context sees the same table as a plain forward.
    prompt = [(7 * i * i + i) % 93 + 3 for i in range(600)]
    tree = DraftTree.from_paths(prompt[-1], [[9, 9], [5, 6, 7]])
    logits = {}
    for name, model in (("scaled", new), ("plain", plain)):
        target = HuggingFaceTarget(model)
        logits[name] = target.forward([Segment(sequence_of(prompt), tuple(prompt[:-1]), tree)]).tree_logits()
        with torch.no_grad():
            expected = model(torch.tensor([[*prompt, 5, 6, 7]])).logits[0, -1]
        torch.testing.assert_close(logits[name][5], expected, atol=2e-3, rtol=1e-3)
    assert not torch.allclose(logits["scaled"], logits["plain"], atol=0.1)


@pytest.mark.parametrize("architecture", ["llama-tied", "gemma2", "gemma3", "cohere", "gpt2"])
def test_tied_heads_read_the_rows_of_the_embedding(architecture, target_of):
    """Row 59: without an `lm_head` of its own, the head is the embedding, bit by bit."""
    target = target_of(architecture)
    assert torch.equal(target.architecture.lm_head.weight, target.architecture.embedding.weight)


def test_a_head_with_missing_weights_is_refused_and_shared_ones_are_not_stored(
    phrase_head_of, target_of, tmp_path
):
    """Row 59: a missing key is an error; the target's embedding and head are borrowed, never written."""
    from safetensors.torch import load_file, save_file

    from paceline.heads.checkpoint import save_head

    loaded = load_head(phrase_head_of("llama"))
    save_head(tmp_path / "head", loaded.head, loaded.vocabulary, loaded.provenance, "A head.")
    path = tmp_path / "head" / "model.safetensors"
    tensors = load_file(path)
    assert set(tensors) == {name for name, _ in loaded.head.named_parameters()}
    assert not any(tensor.shape == (96, 32) for tensor in tensors.values())
    for name in tensors:
        save_file({k: v for k, v in tensors.items() if k != name}, path)
        with pytest.raises(CheckpointError, match="missing tensors"):
            PhraseDrafter.build(target_of("llama"), tmp_path / "head", 8)


@pytest.mark.parametrize(("depth", "trunk_width"), [(1, None), (2, None), (3, None), (2, 48)])
def test_the_phrase_head_equals_a_reference_of_its_own(depth, trunk_width):
    """Row 61: norms and residuals, written out in plain arithmetic."""
    torch.manual_seed(0)
    config = PhraseHeadConfig(8, 12, width=6, depth=depth, trunk_width=trunk_width, feature_layers=(1,))
    head = PhraseHead(config).eval()
    with torch.no_grad():
        for norm in head.norms:
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.uniform_(-0.5, 0.5)
    inputs = torch.randn(5, 24) * 7
    vectors = inputs.view(5, 3, 8)
    size = (vectors.pow(2).mean(dim=2, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()
    state = (vectors / size).flatten(1)
    for layer, norm in zip(head.layers, head.norms, strict=True):
        hidden = state @ layer.weight.T + layer.bias
        hidden = hidden - hidden.mean(dim=1, keepdim=True)
        hidden = hidden / (hidden.pow(2).mean(dim=1, keepdim=True) + norm.eps).sqrt()
        hidden = hidden * norm.weight + norm.bias
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
        state = state + hidden if state.shape == hidden.shape else hidden
    expected = state @ head.output.weight.T + head.output.bias
    torch.testing.assert_close(head(inputs), expected, atol=1e-5, rtol=1e-5)


ALL = sorted(set(TINY_ARCHITECTURES) - {"gpt2-short"})


@pytest.fixture(params=ALL)
def architecture(request):
    return request.param


def test_features_are_the_inputs_of_layers(architecture, target_of):
    """Row 62: the input of layer i is hidden_states[i]; the hidden state is normed exactly once."""
    target = target_of(architecture)
    prompt = PROMPTS[2]
    layers = tuple(range(target.num_layers))
    tree = DraftTree.from_chain(prompt[-1], [5, 6])
    sequence = sequence_of(prompt)
    output = target.forward([Segment(sequence, tuple(prompt[:-1]), tree)], layers)
    target.release(sequence)
    with torch.no_grad():
        states = target.model(torch.tensor([[*prompt, 5, 6]]), output_hidden_states=True).hidden_states
    assert len(states) == target.num_layers + 1
    for layer in layers:
        torch.testing.assert_close(output.features[layer], states[layer][0], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(output.hidden, states[-1][0], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("layer", [2, 30])
def test_layers_out_of_range_are_refused(layer, target_of, phrase_head_of):
    """Row 62: the layer count itself is out of range, for the target and for a head that asks for it."""
    target = target_of("llama")
    for outside in (layer, -1):
        with pytest.raises(ShapeError, match=r"each must be in \[0, 2\)"):
            target.forward([Segment(sequence_of([5]), (), DraftTree.root_only(5))], (outside,))
    with pytest.raises(ConfigError, match="must hold layer numbers"):
        PhraseHeadConfig(32, 10, feature_layers=(-1,))
    loaded = load_head(phrase_head_of("llama"))
    config = PhraseHeadConfig(32, len(loaded.vocabulary), width=8, feature_layers=(0, layer))
    wrong = LoadedHead(PhraseHead(config), loaded.vocabulary, config, loaded.provenance)
    with pytest.raises(CheckpointError, match=f"reads layers \\[{layer}\\], the target has layers 0 to 1"):
        PhraseDrafter(target, wrong)


def test_layers_come_from_the_head_and_reach_the_forward(target_of, phrase_head_of, tokenizer, oracle_of):
    """Row 62: the drafter asks for exactly the layers in the file; drafting with them changes no text."""
    loaded = load_head(phrase_head_of("llama"))
    torch.manual_seed(0)
    config = PhraseHeadConfig(32, len(loaded.vocabulary), width=8, inputs=("hidden",), feature_layers=(1, 0))
    drafter = PhraseDrafter(
        target_of("llama"), LoadedHead(PhraseHead(config), loaded.vocabulary, config, loaded.provenance)
    )
    assert drafter.required_features == (1, 0)
    result = Generator(target_of("llama"), tokenizer, drafter).generate(
        PROMPTS[2], SamplingParameters(max_new_tokens=24)
    )
    assert list(result.token_ids) == oracle_of("llama", tuple(PROMPTS[2]), 24)
    assert result.statistics.num_draft_tokens > 0


def test_logits_of_a_hidden_state_are_the_models_own(architecture, target_of):
    """Row 63: head bias, scale (Granite divides, Cohere multiplies) and soft-cap."""
    target = target_of(architecture)
    with torch.no_grad():
        output = target.model(torch.tensor([PROMPTS[2]]), output_hidden_states=True)
        own = target.lm_head(output.hidden_states[-1][0])
    scale = float(output.logits.abs().max())
    assert float((own - output.logits[0]).abs().max()) <= 1e-5 * max(1.0, scale)
    cap = getattr(target.model.config, "final_logit_softcapping", None)
    assert cap is None or float(own.abs().max()) <= cap


@pytest.mark.parametrize("name", sorted(set(ALL) - {"gpt2"}))
def test_embeddings_are_scaled_as_the_model_scales_them(name, target_of):
    """Row 63: what a head reads of the newest token is what enters the first layer (Gemma, Granite)."""
    target = target_of(name)
    with torch.no_grad():
        states = target.model(torch.tensor([PROMPTS[2]]), output_hidden_states=True).hidden_states
        own = target.embedding(torch.tensor(PROMPTS[2]))
    torch.testing.assert_close(own, states[0][0], atol=1e-5, rtol=1e-5)
    weight = target.architecture.embedding.weight[PROMPTS[2]]
    assert torch.allclose(own, weight) != (name in ("gemma2", "gemma3", "granite"))
