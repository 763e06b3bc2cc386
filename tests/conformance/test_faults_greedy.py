"""Public faults, group A: the greedy verifier returns the target's own text and counts it right."""

from __future__ import annotations

import pytest
import torch

from conftest import PROMPTS
from paceline.bench.near_ties import first_difference, logit_gaps, width_noise
from paceline.drafters.prompt_lookup import PromptLookupDrafter
from paceline.engine.generator import Generator
from paceline.engine.prefill import FixedPace
from paceline.sampling import SamplingParameters
from paceline.testing import ReplayDrafter
from stub_target import StubTarget, scripted_law

PROMPT = tuple(PROMPTS[1])
NUM_NEW = 24


@pytest.fixture
def oracle(oracle_of):
    return oracle_of("llama", PROMPT, NUM_NEW)


def positions_of_new_ids(ids):
    """Positions whose token has not occurred before: an end there is reached there."""
    return [i for i, token_id in enumerate(ids) if token_id not in ids[:i]]


@pytest.mark.parametrize("length", range(1, 13))
@pytest.mark.parametrize("decoys", [False, True], ids=["chain", "tree"])
def test_text_stops_at_an_eos_inside_an_accepted_block(length, decoys, oracle, generator_of):
    """Row 1: nothing drafted behind the EOS is emitted, streamed, cached, observed or counted."""
    ends = positions_of_new_ids(oracle)
    for end in (ends[0], ends[len(ends) // 3], ends[-1]):
        wanted = oracle[: end + 1]
        # The second id of the list would end the text later.
        for eos in ((oracle[end],), (oracle[end], oracle[ends[-1]])):
            drafter = ReplayDrafter({PROMPT: oracle}, length, decoys=decoys)
            generator = generator_of("llama", drafter)
            answer = generator.open(
                list(PROMPT),
                SamplingParameters(max_new_tokens=NUM_NEW, eos_token_ids=eos, logprobs=0),
                keeps_cache=True,
            )
            events = []
            while not answer.sequence.is_finished:
                events += [answer.advance(outcome) for outcome in generator.engine.round()]
            result = events[-1].result
            assert list(result.token_ids) == wanted
            assert result.finish_reason == "stop"
            assert [i for event in events for i in event.token_ids] == wanted
            assert len(result.log_probs) == len(wanted)
            assert result.statistics.num_output_tokens == len(wanted)
            assert generator.target.cached_len(answer.sequence) == len(PROMPT) + len(wanted) - 1
            assert drafter.seen[answer.sequence] == [*PROMPT, *wanted]
            generator.engine.release(answer.sequence)


@pytest.mark.parametrize("length", [1, 6])
def test_every_drafted_position_is_checked(length, oracle, generator_of):
    """Row 2: a wrong draft at position j ends the block there, position 0 included."""
    for wrong in range(length):
        drafter = ReplayDrafter({PROMPT: oracle}, length, wrong=wrong)
        events = list(
            generator_of("llama", drafter).stream(list(PROMPT), SamplingParameters(max_new_tokens=NUM_NEW))
        )
        assert [i for event in events for i in event.token_ids] == oracle
        accepted = [event.origins.count("drafted") for event in events]
        assert accepted[:-1] == [wrong] * (len(events) - 1)


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3])
def test_token_of_the_prompts_forward_is_returned_and_counted(max_new_tokens, tokenizer):
    """Row 3: the first token, made while the prompt is read, counts against the budget like any other."""
    target = StubTarget(scripted_law([5, 6], [9, 8, 7], 96), 96)
    drafter = ReplayDrafter({(5, 6): [9, 8, 7]}, 2)
    result = Generator(target, tokenizer, drafter).generate(
        [5, 6], SamplingParameters(max_new_tokens=max_new_tokens)
    )
    assert list(result.token_ids) == [9, 8, 7][:max_new_tokens]
    assert result.finish_reason == "length"


def test_eos_as_the_first_token_ends_the_text_before_anything_is_drafted_behind_it(tokenizer):
    """Row 3: the stop is tested on the first token as well."""

    class CountingDrafter(ReplayDrafter):
        outputs: list[int]

        def propose(self, sequences, max_nodes):
            self.outputs += [len(sequence.output_ids) for sequence in sequences]
            return super().propose(sequences, max_nodes)

    target = StubTarget(scripted_law([5, 6], [9, 8, 7], 96), 96)
    drafter = CountingDrafter({(5, 6): [9, 8, 7]}, 2)
    drafter.outputs = []
    result = Generator(target, tokenizer, drafter, eos_token_ids=(9,)).generate([5, 6])
    assert result.token_ids == (9,)
    assert result.finish_reason == "stop"
    assert drafter.outputs == [0]
    assert target.num_forwards == 1


@pytest.mark.parametrize("wrong", [None, 0, 2])
def test_drafters_see_prompt_and_emitted_tokens_after_every_round(wrong, oracle, generator_of):
    """Row 4: the history a drafter draws from is the committed text, each token once."""
    lookup = PromptLookupDrafter()
    drafter = ReplayDrafter({PROMPT: oracle}, 4, wrong=wrong)
    histories = []

    class Both(ReplayDrafter):
        """Drafts by replay, while prompt lookup watches."""

        def propose(self, sequences, max_nodes):
            lookup.propose(sequences, max_nodes)
            return drafter.propose(sequences, max_nodes)

        def observe(self, output, results):
            lookup.observe(output, results)
            drafter.observe(output, results)
            sequence = output.segments[0].sequence
            index = lookup._states[sequence].index
            histories.append((drafter.seen[sequence], index._token_ids[:], sequence.token_ids))

    generator_of("llama", Both({}, 4)).generate(list(PROMPT), SamplingParameters(max_new_tokens=NUM_NEW))
    assert len(histories) >= 4
    for seen, indexed, committed in histories:
        assert seen == indexed == committed
    assert histories[-1][2] == [*PROMPT, *oracle]


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "gpt2"])
def test_in_half_precision_every_token_is_the_argmax_or_a_near_tie(architecture, tokenizer, target_of):
    """Row 6: judged under its own prefix by the plain model, every bf16 token is the argmax or a tie."""
    target = target_of(architecture, dtype=torch.bfloat16)
    prompt = PROMPTS[2]
    parameters = SamplingParameters(max_new_tokens=60)
    plain = Generator(target, tokenizer, ReplayDrafter({}, 0)).generate(prompt, parameters)
    noise = width_noise(target.model, [[*prompt, *plain.token_ids]])
    recorded = {tuple(prompt): plain.token_ids}
    for drafter in (ReplayDrafter(recorded, 7), ReplayDrafter(recorded, 3, wrong=2, decoys=True)):
        result = Generator(target, tokenizer, drafter).generate(prompt, parameters)
        for position, token_id in enumerate(result.token_ids):
            prefix = [*prompt, *result.token_ids[:position]]
            _, gap = logit_gaps(target.model, prefix, token_id, token_id)
            assert gap <= noise


def test_first_difference_of_two_answers_is_reported_with_its_margin(oracle, target_of):
    """Row 6: position and margin are what tells a near-tie from a fault."""
    other = oracle[:]
    other[5] = (other[5] + 1) % 96
    assert first_difference(other, oracle) == 5
    model = target_of("llama").model
    top2_gap, gap = logit_gaps(model, [*PROMPT, *oracle[:5]], oracle[5], other[5])
    logits = model(torch.tensor([[*PROMPT, *oracle[:5]]])).logits[0, -1].detach()
    best = logits.topk(2).values
    assert top2_gap == pytest.approx(float(best[0] - best[1]), abs=1e-4)
    assert gap == pytest.approx(float(best[0] - logits[other[5]]), abs=1e-4)
    assert gap > 0.01


def test_prompt_is_cut_alike_with_and_without_drafting(generator_of, target_of, phrase_head_of, tokenizer):
    """Row 7: bf16; the first logits are bit-equal when the first forward holds the prompt only."""
    from paceline.drafters.phrase import PhraseDrafter

    target = target_of("llama", dtype=torch.bfloat16)
    parameters = SamplingParameters(max_new_tokens=2, logprobs=5)
    firsts = []
    for drafter in (ReplayDrafter({}, 0), PhraseDrafter.build(target, phrase_head_of("llama"), 12)):
        generator = Generator(target, tokenizer, drafter)
        generator.engine.pace = FixedPace(16)
        firsts.append(generator.generate(PROMPTS[2], parameters).log_probs[0])
    assert firsts[0] == firsts[1]
