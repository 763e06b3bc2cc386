"""Every sequence has the drafter that it asked for."""

from __future__ import annotations

import pytest

from paceline.drafters.none import NoDrafter
from paceline.drafters.phrase import PhraseDrafter
from paceline.drafters.prompt_lookup import PromptLookupDrafter
from paceline.drafters.switching import SwitchingDrafter
from paceline.engine.forward_cost import ForwardCost
from paceline.engine.generator import Generator
from paceline.engine.node_budget import AdaptiveBudget
from paceline.errors import ConfigError, RequestError
from paceline.sampling import SamplingParameters

PROMPTS = ([5, 6, 7, 8, 9], [7, 8, 7, 8, 7, 8], [11, 12, 13], [9, 9, 9, 9])
PARAMETERS = SamplingParameters(max_new_tokens=20)


class Watching(NoDrafter):
    """Notes the sequences that it is shown, and the layers that were given."""

    required_features = (1,)

    def __init__(self):
        self.seen, self.released = set(), []

    def propose(self, sequences, max_nodes):
        self.seen.update(sequences)
        return super().propose(sequences, max_nodes)

    def observe(self, output, results):
        assert len(output.segments) == len(results)
        assert output.features[1].shape == output.hidden.shape
        assert len(output.hidden) == sum(map(len, output.segments))
        self.seen.update(segment.sequence for segment in output.segments)

    def release(self, sequence):
        self.released.append(sequence)


@pytest.fixture
def parts(target_of, phrase_head_of):
    target = target_of("llama")
    return {
        "phrase": PhraseDrafter.build(target, phrase_head_of("llama"), 16),
        "prompt_lookup": PromptLookupDrafter(),
        "watching": Watching(),
        "none": NoDrafter(),
    }


def test_answers_are_the_targets_own_whichever_drafters_share_a_batch(parts, generator_of, oracle_of):
    generator = generator_of(drafter=SwitchingDrafter(parts, "phrase"))
    names = [None, "prompt_lookup", "watching", "none"]
    answers = [
        generator.open(list(prompt), PARAMETERS, drafter=name)
        for prompt, name in zip(PROMPTS, names, strict=True)
    ]
    results = {}
    for event in generator.run(answers):
        if event.event.result is not None:
            results[event.index] = event.event.result
    for index, prompt in enumerate(PROMPTS):
        assert list(results[index].token_ids) == oracle_of("llama", tuple(prompt), 20)
    drafted = [results[i].statistics.num_draft_tokens for i in range(4)]
    assert min(drafted[:2]) > 0
    assert drafted[2:] == [0, 0]


def test_a_drafter_sees_its_own_sequences_alone_and_is_told_of_their_end(parts, generator_of):
    generator = generator_of(drafter=SwitchingDrafter(parts, "phrase"))
    own = generator.open([5, 6, 7], PARAMETERS, drafter="watching")
    others = [generator.open([5, 6], PARAMETERS), generator.open([8, 8, 8], PARAMETERS, drafter="none")]
    list(generator.run([own, *others]))
    assert parts["watching"].seen == {own.sequence}
    assert parts["watching"].released == [own.sequence]


def test_only_the_layers_of_drafters_in_use_are_asked_for(parts, generator_of):
    switching = SwitchingDrafter(parts, "phrase")
    generator = generator_of(drafter=switching)
    assert switching.required_features == ()
    answer = generator.open([5, 6, 7], PARAMETERS, drafter="watching")
    assert switching.required_features == (1,)
    list(generator.run([answer]))
    assert switching.required_features == ()


def test_unknown_names_are_refused_and_leave_nothing_behind(parts, generator_of):
    generator = generator_of(drafter=SwitchingDrafter(parts, "phrase"))
    with pytest.raises(RequestError, match="'fhrase' is not loaded: did you mean 'phrase'"):
        generator.open([5, 6], PARAMETERS, drafter="fhrase")
    assert not generator.engine.has_work
    with pytest.raises(ConfigError, match="default drafter 'eagle' is not one of"):
        SwitchingDrafter(parts, "eagle")
    with pytest.raises(RequestError, match="only one is loaded"):
        generator_of().open([5, 6], PARAMETERS, drafter="none")


@pytest.mark.parametrize("wish", [{"drafter": "none"}, {"max_draft_tokens": 0}])
def test_requests_that_want_no_drafts_do_not_stop_those_of_others(wish, parts, target_of, tokenizer):
    """Their rounds say nothing about whether drafting pays."""
    budget = AdaptiveBudget(ForwardCost((1, 2, 128), (0.02, 0.02, 0.02)))
    drafter = SwitchingDrafter(parts, "phrase")
    generator = Generator(target_of("llama"), tokenizer, drafter, num_speculative_tokens=budget)
    list(generator.run([generator.open(list(PROMPTS[0]), SamplingParameters(max_new_tokens=5))]))
    num_judged = budget._window.num_rounds
    plain = generator.open(list(PROMPTS[0]), SamplingParameters(max_new_tokens=40), **wish)
    assert all(event.event.num_draft_tokens == 0 for event in generator.run([plain]))
    assert budget.allot(1, 50.0) > 0
    assert budget._window.num_rounds == num_judged > 0
    drafted = generator.open(list(PROMPTS[0]), SamplingParameters(max_new_tokens=40))
    widths = [event.event.num_draft_tokens for event in generator.run([drafted])]
    assert any(widths[:4])


def test_a_batch_of_both_drafts_for_those_that_want_it(parts, target_of, tokenizer, oracle_of):
    generator = Generator(target_of("llama"), tokenizer, SwitchingDrafter(parts, "phrase"))
    prompts = (PROMPTS[0], PROMPTS[2])
    answers = [
        generator.open(list(p), PARAMETERS, drafter=name)
        for p, name in zip(prompts, ("none", "phrase"), strict=True)
    ]
    widths = {0: 0, 1: 0}
    for item in generator.run(answers):
        widths[item.index] += item.event.num_draft_tokens
    assert widths[0] == 0 < widths[1]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.sequence.output_ids == oracle_of("llama", tuple(prompt), 20)


def test_a_request_may_ask_for_fewer_nodes(parts, generator_of):
    generator = generator_of(drafter=SwitchingDrafter(parts, "phrase"))
    answer = generator.open(list(PROMPTS[0]), PARAMETERS, max_draft_tokens=3)
    widths = [event.event.num_draft_tokens for event in generator.run([answer])]
    assert 0 < max(widths) <= 3
