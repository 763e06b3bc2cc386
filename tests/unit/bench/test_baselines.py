"""Hugging Face `generate()` as an arm."""

from __future__ import annotations

import pytest
import torch

from paceline.bench.baselines import HuggingFaceArm, baseline_arms
from paceline.errors import ConfigError, UnsupportedFeatureError

PROMPTS = ([7], [5, 6, 7, 8, 9], list(range(3, 20)))


def arm_of(target_of, tokenizer, architecture="llama", baseline="hf_generate", eos=()):
    return HuggingFaceArm(baseline, target_of(architecture).model, tokenizer, eos)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_batch_padded_on_the_left_equals_the_oracle_of_each_prompt(
    target_of, oracle_of, tokenizer, architecture
):
    answers = arm_of(target_of, tokenizer, architecture).answer(PROMPTS, 10)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert list(answer.token_ids) == oracle_of(architecture, tuple(prompt), 10)
        assert answer.statistics is None


def test_prompt_lookup_gives_the_same_ids(target_of, oracle_of, tokenizer):
    prompt = tuple([5, 6, 7, 8] * 4)
    [answer] = arm_of(target_of, tokenizer, baseline="hf_prompt_lookup").answer([prompt], 12)
    assert list(answer.token_ids) == oracle_of("llama", prompt, 12)


def test_prompt_lookup_refuses_a_batch(target_of, tokenizer):
    with pytest.raises(UnsupportedFeatureError, match="batch-size 1"):
        arm_of(target_of, tokenizer, baseline="hf_prompt_lookup").answer(PROMPTS, 4)


def test_an_answer_ends_with_its_end_of_sequence_and_padding_is_not_counted(target_of, oracle_of, tokenizer):
    long = oracle_of("llama", tuple(PROMPTS[1]), 10)
    eos = long[3]
    answers = arm_of(target_of, tokenizer, eos=(eos,)).answer([PROMPTS[1], PROMPTS[2]], 10)
    assert list(answers[0].token_ids) == long[: long.index(eos) + 1]
    other = oracle_of("llama", tuple(PROMPTS[2]), 10)
    assert list(answers[1].token_ids) == (other[: other.index(eos) + 1] if eos in other else other)


def test_penalties_of_the_models_own_configuration_are_switched_off(
    target_of, oracle_of, tokenizer, monkeypatch
):
    config = target_of("llama").model.generation_config
    for name, value in (("repetition_penalty", 5.0), ("no_repeat_ngram_size", 1), ("do_sample", True)):
        monkeypatch.setattr(config, name, value)
    [answer] = arm_of(target_of, tokenizer).answer([PROMPTS[1]], 10)
    assert list(answer.token_ids) == oracle_of("llama", tuple(PROMPTS[1]), 10)


def test_unknown_baselines_name_the_nearest(generator_of):
    with pytest.raises(ConfigError, match="hf_generate"):
        baseline_arms(generator_of(), ["hf_generat"])


def test_baselines_share_the_generators_model(generator_of):
    generator = generator_of()
    [arm] = baseline_arms(generator, ["hf_generate"])
    assert arm._model is generator.target.model


def test_a_baseline_of_another_dtype_runs_a_copy(generator_of):
    """The shared model keeps its dtype; the arm's own dtype needs no copy."""
    generator = generator_of()
    arms = baseline_arms(generator, ["hf_generate", "hf_generate_fp32", "hf_generate_bf16"])
    same, fp32, bf16 = [arm._model for arm in arms]
    assert same is fp32 is generator.target.model
    assert (same.dtype, bf16.dtype) == (torch.float32, torch.bfloat16)
    assert len(bf16.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, pad_token_id=0)[0]) == 5
    assert [str(arm.name) for arm in arms][2] == "hf_generate_bf16/greedy"
