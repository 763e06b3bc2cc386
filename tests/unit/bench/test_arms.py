"""Building arms on one shared target."""

from __future__ import annotations

import pytest

from paceline.bench.arms import ArmName, EngineArm, engine_arms
from paceline.errors import ConfigError, UnsupportedFeatureError
from paceline.registry import verifier_names


def test_there_is_an_arm_for_every_drafter_verifier_and_width(generator_of):
    arms = engine_arms(generator_of(), ["none", "prompt_lookup"], ["greedy", "sampling"], [4, 8])
    assert [str(arm.name) for arm in arms] == [
        "none/greedy",
        "none/sampling",
        "prompt_lookup/greedy/4",
        "prompt_lookup/sampling/4",
        "prompt_lookup/greedy/8",
        "prompt_lookup/sampling/8",
    ]


def test_all_arms_share_one_target(generator_of):
    generator = generator_of()
    arms = engine_arms(generator, ["none", "prompt_lookup"], ["greedy"], [4])
    assert all(arm.generator.target is generator.target for arm in arms)


def test_an_arm_asked_for_twice_is_refused(generator_of):
    with pytest.raises(UnsupportedFeatureError, match="none/greedy"):
        engine_arms(generator_of(), ["none", "none"], ["greedy"], [4])


@pytest.mark.parametrize(("drafters", "verifiers"), [(["nonne"], ["greedy"]), (["none"], ["gredy"])])
def test_unknown_names_are_refused_before_anything_runs(generator_of, drafters, verifiers):
    with pytest.raises(ConfigError, match="did you mean"):
        engine_arms(generator_of(), drafters, verifiers, [4])


def test_greedy_arms_give_the_oracles_ids_and_sampled_ones_repeat_with_their_seed(generator_of, oracle_of):
    prompt = (5, 6, 7, 8, 9)
    greedy, sampled = engine_arms(
        generator_of(), ["none"], ["greedy", "sampling"], [4], temperature=1.0, seed=3
    )
    assert list(greedy.answer([prompt], 10)[0].token_ids) == oracle_of("llama", prompt, 10)
    first, second = (sampled.answer([prompt], 10)[0].token_ids for _ in range(2))
    assert first == second != greedy.answer([prompt], 10)[0].token_ids


def test_an_arm_ignores_penalties_of_the_models_own_configuration(generator_of, oracle_of):
    from paceline.sampling import SamplingParameters

    generator = generator_of(default_parameters=SamplingParameters(repetition_penalty=5.0))
    arm = EngineArm(ArmName("none"), generator)
    assert list(arm.answer([(5, 6, 7)], 10)[0].token_ids) == oracle_of("llama", (5, 6, 7), 10)


@pytest.mark.parametrize("verifier", verifier_names())
def test_every_registered_verifier_runs_as_an_arm(generator_of, verifier):
    arms = engine_arms(generator_of(), ["prompt_lookup"], list(dict.fromkeys(["greedy", verifier])), [4])
    for arm in arms:
        assert len(arm.answer([(5, 6, 7)], 6)[0].token_ids) == 6
        assert len(arm.answer_fixed([(5, 6, 7)], 6)[0].token_ids) == 6


def test_strict_verification_is_measured_again_behind_lossy_ones(generator_of):
    arms = engine_arms(generator_of(), ["none", "prompt_lookup"], ["greedy", "budgeted", "margin:1"], [4])
    assert [str(arm.name) for arm in arms] == [
        "none/greedy",
        "prompt_lookup/greedy/4",
        "prompt_lookup/budgeted/4",
        "prompt_lookup/margin:1/4",
        "prompt_lookup/greedy/4#2",
    ]
    assert all(arm.is_scored for arm in arms)
    assert arms[3].parameters.relaxation.max_regret == 1.0
