"""Public faults, group D: a rejected draft leaves no trace in any state, or the model is refused at load."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from conftest import PROMPTS
from paceline import kv_cache
from paceline.drafters.phrase import PhraseDrafter
from paceline.engine.generator import Generator
from paceline.engine.load import load
from paceline.engine.prefill import FixedPace
from paceline.errors import IncompatibleModelError, UnsupportedFeatureError
from paceline.sampling import SamplingParameters
from paceline.sequence import Segment, Sequence
from paceline.targets.huggingface import HuggingFaceTarget
from paceline.testing import ReplayDrafter, greedy_oracle, tiny_model
from paceline.tree import DraftTree


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", ["mistral-sliding", "qwen2-sliding", "gemma3", "phi3-sliding"])
def test_full_window_with_rejected_drafts_equals_the_oracle(architecture, attention, tokenizer):
    """Row 23: window 8, prompt 12, 40 new tokens; a second witness is transformers' own prompt lookup."""
    model = tiny_model(architecture, attention=attention)
    prompt = PROMPTS[2][:12]
    expected = greedy_oracle(model, prompt, 40)
    target = HuggingFaceTarget(model)
    for wrong in (None, 0, 2, 5):
        for decoys in (False, True):
            drafter = ReplayDrafter({tuple(prompt): expected}, 6, wrong=wrong, decoys=decoys)
            result = Generator(target, tokenizer, drafter).generate(
                prompt, SamplingParameters(max_new_tokens=40)
            )
            assert list(result.token_ids) == expected
    witness = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, 12, dtype=torch.int64),
        max_new_tokens=40,
        do_sample=False,
        eos_token_id=None,
        prompt_lookup_num_tokens=3,
    )
    assert witness[0, 12:].tolist() == expected


_TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LINEAR_HEADS = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
# Model class prefix -> settings.
STATEFUL = {
    "Mamba": {"vocab_size": 96, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2},
    "Rwkv": {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32},
    "RecurrentGemma": {**_TINY, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8},
    "Qwen3Next": {
        **_TINY,
        **_LINEAR_HEADS,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "Jamba": {
        **_TINY,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "mamba_d_state": 4,
        "use_mamba_kernels": False,
    },
    "Lfm2": {**_TINY, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
}


def build(name, settings, suffix="ForCausalLM"):
    config = getattr(transformers, f"{name}Config")(**settings)
    return getattr(transformers, f"{name}{suffix}")(config).eval()


@pytest.mark.parametrize("name", sorted(STATEFUL))
def test_recurrent_and_convolution_states_are_refused_at_load(name, tokenizer):
    """Row 25: states that would keep rejected drafts are refused at load, and the message says why."""
    with pytest.raises(IncompatibleModelError, match=f"{name}ForCausalLM has layers of type .*rolled back"):
        load(model=build(name, STATEFUL[name]), tokenizer=tokenizer, drafter="none")


class RunningSum(nn.Module):
    """Adds a decaying sum over everything it has ever read: a state that no cache knows of."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.state = None

    def forward(self, hidden_states):
        if self.state is None:
            self.state = torch.zeros(hidden_states.shape[-1])
        outputs = []
        for step in hidden_states.unbind(dim=1):
            self.state = 0.5 * self.state + step.mean(dim=0)
            outputs.append(self.inner(step + self.state))
        return torch.stack(outputs, dim=1)


def test_a_hidden_state_is_found_by_its_logits():
    """Row 25: a state inside an ordinary model is found by comparing logits, not by acceptance."""
    model = tiny_model("llama")
    model.model.layers[0].mlp = RunningSum(model.model.layers[0].mlp)
    with pytest.raises(IncompatibleModelError, match="does not verify draft trees: its logits at"):
        HuggingFaceTarget(model)


def test_layers_that_do_not_use_the_cache_are_refused():
    """Row 26: a cache that is not written cannot be trimmed."""
    model = tiny_model("llama")
    attention = model.model.layers[1].self_attn
    original = attention.forward

    def without_cache(*args, **kwargs):
        return original(*args, **{**kwargs, **dict.fromkeys(kwargs.keys() & {"cache", "past_key_values"})})

    attention.forward = without_cache
    with pytest.raises(IncompatibleModelError, match=r"keep no keys and values"):
        HuggingFaceTarget(model)


def test_a_layer_that_keeps_keys_of_its_own_is_refused():
    """Row 26: the probe appends, drops and compares: what is not dropped shows in the logits."""
    model = tiny_model("llama")
    layer = model.model.layers[0]
    original, kept = layer.forward, []

    def with_memory(hidden_states, *args, **kwargs):
        kept.append(hidden_states.mean(dim=1, keepdim=True))
        return original(hidden_states + torch.stack(kept).mean(dim=0), *args, **kwargs)

    layer.forward = with_memory
    with pytest.raises(IncompatibleModelError, match="does not verify draft trees"):
        HuggingFaceTarget(model)


def test_models_whose_forward_fails_on_a_tree_are_refused_in_one_line():
    """Row 26: Bloom takes no 4-D mask; its own exception is reported, not passed through."""
    with pytest.raises(IncompatibleModelError, match="BloomForCausalLM cannot verify draft trees"):
        HuggingFaceTarget(build("Bloom", {"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4}))


def test_attention_with_a_window_of_its_own_is_refused():
    """Row 26: GPT-Neo's local layers mask by their own window, further back than any short probe looks."""
    settings = {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
    }
    with pytest.raises(IncompatibleModelError, match="layers of type global, local"):
        HuggingFaceTarget(build("GPTNeo", settings))


@pytest.mark.parametrize(("name", "suffix"), [("T5", "ForConditionalGeneration"), ("Bert", "Model")])
def test_models_that_are_not_causal_decoders_are_refused(name, suffix):
    """Row 26: encoder-decoders and encoders."""
    settings = {
        "T5": {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
        "Bert": _TINY,
    }[name]
    with pytest.raises(IncompatibleModelError, match="not a decoder-only causal LM"):
        HuggingFaceTarget(build(name, settings, suffix))


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flex_attention"])
def test_attention_without_a_tree_mask_is_refused_by_name(implementation):
    """Row 26: implementations that take no arbitrary mask would verify every tree as a chain."""
    model = tiny_model("llama")
    model.config._attn_implementation_internal = implementation
    with pytest.raises(UnsupportedFeatureError, match=f"'{implementation}' takes no draft-tree mask"):
        HuggingFaceTarget(model)


def test_a_model_on_several_devices_is_refused():
    """Row 26: a target lies on one device."""
    model = tiny_model("llama")
    model.lm_head.to("meta")
    with pytest.raises(UnsupportedFeatureError, match=r"lies on devices \['cpu', 'meta'\]"):
        HuggingFaceTarget(model)


def test_adapters_that_can_be_swapped_are_refused(tokenizer):
    """Row 26: the cache of one adapter is wrong for another."""
    model = tiny_model("llama")
    model.peft_config = {"default": SimpleNamespace()}
    with pytest.raises(UnsupportedFeatureError, match="LoRA"):
        load(model=model, tokenizer=tokenizer, drafter="none")


@pytest.mark.parametrize("decoys", [False, True], ids=["chain", "tree"])
def test_buffers_stay_in_place_while_drafts_are_rejected(decoys, target_of, tokenizer, oracle_of):
    """Row 27: no rollback replaces a buffer; the text equals the oracle."""
    prompt = tuple(PROMPTS[2])
    expected = oracle_of("llama", prompt, 24)
    target = HuggingFaceTarget(target_of("llama").model)
    target.kv_cache.reserve(1, 100)
    places = [t.data_ptr() for t in (*target.kv_cache._keys, *target.kv_cache._values)]
    drafter = ReplayDrafter({prompt: expected}, 4, wrong=2, decoys=decoys)
    result = Generator(target, tokenizer, drafter).generate(
        list(prompt), SamplingParameters(max_new_tokens=24)
    )
    assert list(result.token_ids) == expected
    assert [t.data_ptr() for t in (*target.kv_cache._keys, *target.kv_cache._values)] == places


@pytest.mark.parametrize("buffers", ["roomy", "moved", "taken whole"])
def test_buffers_grow_without_losing_what_they_hold(buffers, target_of, tokenizer, monkeypatch):
    """Row 27: more tokens, and more sequences, than a first block has room for."""
    if buffers == "moved":
        monkeypatch.setattr(kv_cache, "ROOM_SLOTS", 1)
        monkeypatch.setattr(kv_cache, "ROOM_LEN", 128)
    if buffers == "taken whole":
        monkeypatch.setattr(kv_cache, "lazy_zeros", lambda *_: None)
    target = HuggingFaceTarget(target_of("llama").model)
    generation = target.kv_cache.generation
    assert target.kv_cache.capacity == 128
    prompts = [PROMPTS[2] * 3 + PROMPTS[1], PROMPTS[2], PROMPTS[1]]
    expected = {tuple(p): greedy_oracle(target.model, p, 30) for p in prompts}
    drafter = ReplayDrafter(expected, 5, wrong=3, decoys=True)
    generator = Generator(target, tokenizer, drafter)
    results = generator.generate_batch(prompts, SamplingParameters(max_new_tokens=30))
    assert [list(r.token_ids) for r in results] == list(expected.values())
    assert target.kv_cache.capacity == 256
    assert (target.kv_cache.generation == generation) == (buffers == "roomy")


@pytest.mark.parametrize("prefill_chunk", [512, 10])
def test_the_phrase_drafter_keeps_states_of_a_fresh_run_over_the_accepted_tokens(
    prefill_chunk, target_of, phrase_head_of, tokenizer
):
    """Row 28: after every round the state equals a fresh prefill's, and nothing guessed is kept."""
    target = target_of("llama")
    drafter = PhraseDrafter.build(target, phrase_head_of("llama"), 4)
    generator = Generator(target, tokenizer, drafter, num_speculative_tokens=4)
    generator.engine.pace = FixedPace(prefill_chunk)
    answers = [generator.open(list(p), SamplingParameters(max_new_tokens=20)) for p in PROMPTS]
    num_accepted = num_checked = 0
    while generator.engine.has_work:
        num_accepted += sum(len(outcome.result.path) for outcome in generator.engine.round())
        for answer in answers:
            sequence = answer.sequence
            if sequence.is_finished or not sequence.output_ids:
                continue
            state = drafter._states[sequence]
            assert state.num_tokens == len(sequence) - 1
            ids = torch.tensor([sequence.token_ids[:-1]])
            with torch.no_grad():
                fresh = target.model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0, -1]
            torch.testing.assert_close(state.vectors[0], fresh, atol=1e-4, rtol=1e-4)
            num_checked += 1
    assert num_accepted > 5
    assert num_checked > 10
    assert not drafter._states


def test_a_forward_that_is_never_committed_leaves_the_cache_as_it_was(target_of):
    """Row 28: nodes written by a forward count for nothing until a result is committed."""
    target = HuggingFaceTarget(target_of("llama").model)
    prompt = PROMPTS[1]
    sequence = Sequence(prompt, SamplingParameters(), frozenset(), 256, seed=0)
    tree = DraftTree.from_paths(prompt[-1], [[1, 2, 3], [4]])
    first = target.forward([Segment(sequence, tuple(prompt[:-1]), tree)]).tree_logits()
    other = DraftTree.from_paths(prompt[-1], [[9, 8]])
    target.forward([Segment(sequence, (), other)])
    again = target.forward([Segment(sequence, (), tree)]).tree_logits()
    torch.testing.assert_close(first, again, atol=1e-5, rtol=1e-5)
