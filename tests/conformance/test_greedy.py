"""Greedy decoding gives the ids of a plain, cacheless decode: every architecture, draft shape and batch."""

from __future__ import annotations

import pytest
import torch

from conftest import PROMPTS
from paceline.engine.prefill import FixedPace
from paceline.sampling import SamplingParameters
from paceline.testing import TINY_ARCHITECTURES, ReplayDrafter, greedy_oracle, tiny_model

NUM_NEW = 20
GREEDY = SamplingParameters(max_new_tokens=NUM_NEW)
ARCHITECTURES = sorted(set(TINY_ARCHITECTURES) - {"gpt2-short"})


@pytest.fixture(params=ARCHITECTURES)
def architecture(request):
    return request.param


def test_plain_decoding_equals_the_oracle_and_generate(architecture, generator_of, oracle_of):
    generator = generator_of(architecture)
    for prompt in PROMPTS:
        expected = oracle_of(architecture, tuple(prompt), NUM_NEW)
        result = generator.generate(prompt, GREEDY)
        assert list(result.token_ids) == expected
        assert result.finish_reason == "length"
        reference = generator.target.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NUM_NEW,
            do_sample=False,
            eos_token_id=None,
        )
        assert reference[0, len(prompt) :].tolist() == expected


@pytest.mark.parametrize("length", [1, 3, 6])
@pytest.mark.parametrize("decoys", [False, True], ids=["chain", "tree"])
def test_replayed_drafts_change_nothing_and_are_counted_right(
    architecture, length, decoys, generator_of, oracle_of
):
    prompt = PROMPTS[2]
    expected = oracle_of(architecture, tuple(prompt), NUM_NEW)
    for wrong in [None, *range(length)]:
        drafter = ReplayDrafter({tuple(prompt): expected}, length, wrong=wrong, decoys=decoys)
        result = generator_of(architecture, drafter).generate(prompt, GREEDY)
        assert list(result.token_ids) == expected
        per_round = (length if wrong is None else wrong) + 1
        assert result.statistics.num_rounds == -(-NUM_NEW // per_round)
        assert result.statistics.num_output_tokens == NUM_NEW


def test_batched_sequences_equal_each_alone_with_ragged_acceptance(architecture, generator_of, oracle_of):
    expected = {tuple(p): oracle_of(architecture, tuple(p), NUM_NEW) for p in PROMPTS}
    recorded = dict(expected)
    # The second prompt is never drafted right, so the three advance at different speeds.
    recorded[tuple(PROMPTS[1])] = [0] * NUM_NEW
    drafter = ReplayDrafter(recorded, 4, decoys=True)
    lengths = [9, NUM_NEW, 13]
    parameters = [SamplingParameters(max_new_tokens=n) for n in lengths]
    for batch_size in (2, 3):
        generator = generator_of(architecture, drafter, max_batch_size=batch_size)
        results = generator.generate_batch(PROMPTS, parameters)
        for prompt, length, result in zip(PROMPTS, lengths, results, strict=True):
            assert list(result.token_ids) == expected[tuple(prompt)][:length]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gemma3", "gpt2"])
def test_both_attention_implementations_agree_with_the_oracle(name, attention, generator_of, tokenizer):
    from paceline.engine.generator import Generator
    from paceline.targets.huggingface import HuggingFaceTarget

    model = tiny_model(name, attention=attention)
    prompt = PROMPTS[1]
    expected = greedy_oracle(model, prompt, 30)
    for wrong in (None, 0, 2):
        drafter = ReplayDrafter({tuple(prompt): expected}, 5, wrong=wrong, decoys=True)
        generator = Generator(HuggingFaceTarget(model), tokenizer, drafter)
        assert list(generator.generate(prompt, SamplingParameters(max_new_tokens=30)).token_ids) == expected
    assert model.config._attn_implementation == attention


def test_prompt_in_chunks_equals_the_prompt_in_one_piece(architecture, generator_of, oracle_of):
    generator = generator_of(architecture)
    generator.engine.pace = FixedPace(7)
    result = generator.generate(PROMPTS[2], GREEDY)
    assert list(result.token_ids) == oracle_of(architecture, tuple(PROMPTS[2]), NUM_NEW)
