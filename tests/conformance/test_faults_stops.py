"""Public faults, group C: where a text ends does not depend on how many tokens a round brings."""

from __future__ import annotations

import gc

import pytest

from conftest import PROMPTS
from paceline.drafters.prompt_lookup import PromptLookupDrafter
from paceline.engine.generator import Generator
from paceline.errors import RequestError
from paceline.sampling import SamplingParameters
from paceline.sequence import Sequence
from paceline.targets.huggingface import HuggingFaceTarget
from paceline.testing import TINY_EOS, TINY_VOCAB, ReplayDrafter, greedy_oracle, tiny_model
from stub_target import StubTarget, scripted_law

PROMPT = (5, 6, 7, 8)
TEXT = "the cat in a hat and the man in a van ran on and on"


@pytest.fixture
def script(tokenizer):
    return [*tokenizer(TEXT)["input_ids"], TINY_EOS]


@pytest.fixture
def writer(script, tokenizer):
    """Generators that write TEXT, then its end, whatever is drafted."""

    def make(length=0, **settings):
        target = StubTarget(scripted_law(PROMPT, script, TINY_VOCAB), TINY_VOCAB)
        drafter = ReplayDrafter({PROMPT: script * 2}, length, **settings)
        return Generator(target, tokenizer, drafter, eos_token_ids=(TINY_EOS,))

    return make


def run(generator, prompt, **parameters):
    """Streams; checks that the stream and the result say the same."""
    events = list(generator.stream(list(prompt), SamplingParameters(**parameters)))
    result = events[-1].result
    assert [event.result for event in events[:-1]] == [None] * (len(events) - 1)
    assert "".join(event.text for event in events) == result.text
    assert tuple(i for event in events for i in event.token_ids) == result.token_ids
    assert result.statistics.num_output_tokens == len(result.token_ids)
    if result.log_probs is not None:
        assert tuple(entry.token_id for entry in result.log_probs) == result.token_ids
    return result


@pytest.mark.parametrize("length", [0, 1, 2, 3, 7, 20])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", [" in a v", "hat and", "t", "e c", "on and on"])
def test_stop_string_cuts_text_ids_and_log_probs_alike_for_every_block_size(
    length, include, stop, writer, script, tokenizer
):
    """Row 15: also when the string begins or ends inside a token, and when it spans two blocks."""
    result = run(writer(length), PROMPT, stop=(stop,), include_stop_string=include, logprobs=0)
    cut = TEXT.index(stop)
    assert result.text == TEXT[: cut + len(stop) if include else cut]
    assert result.finish_reason == "stop"
    # The token that completes the string is the last one that counts.
    needed = next(n for n in range(len(script)) if stop in tokenizer.decode(script[:n]))
    assert list(result.token_ids) == script[:needed]
    assert len(result.log_probs) == needed


@pytest.mark.parametrize("length", [0, 1, 4, 20])
def test_the_stop_string_that_is_completed_first_counts(length, writer):
    """Row 15: several stop strings, one of them never completed, one inside another."""
    result = run(writer(length), PROMPT, stop=("hat and the woman", " a hat", "hat", "zzz"))
    assert result.text == "the cat in"


@pytest.mark.parametrize("length", [0, 1, 7, 20])
def test_a_stop_string_that_never_comes_changes_nothing(length, writer, script):
    """Row 15: text that was held back as a possible beginning of a stop string is given out at the end."""
    result = run(writer(length), PROMPT, stop=("on and on and on",))
    assert result.text == TEXT
    assert list(result.token_ids) == script
    assert result.finish_reason == "stop"


def test_tokens_behind_a_stop_string_are_neither_cached_nor_observed(writer, script):
    """Row 15: the cache and the drafter see the trimmed text."""
    generator = writer(20)
    answer = generator.open(list(PROMPT), SamplingParameters(stop=("hat",)), keeps_cache=True)
    generator.engine.round()
    ids = answer.sequence.token_ids
    assert answer.sequence.is_finished
    assert generator.target.cache[answer.sequence] == ids[:-1]
    assert generator.drafter.seen[answer.sequence] == ids


@pytest.mark.parametrize("length", [0, 1, 3, 7])
@pytest.mark.parametrize("decoys", [False, True], ids=["chain", "tree"])
def test_early_ends_are_masked_at_every_drafted_position(length, decoys, generator_of, oracle_of, target_of):
    """Row 17: the text is the constrained oracle's: no EOS before `min_new_tokens`, one right behind it."""
    model, prompt, shortest = target_of("llama").model, PROMPTS[1], 10
    plain = oracle_of("llama", tuple(prompt), 24)

    def constrained(ends):
        def forbid_early_end(logits, ids):
            if len(ids) - len(prompt) < shortest:
                logits[list(ends)] = float("-inf")
            return logits

        return greedy_oracle(model, prompt, 24, eos_token_ids=ends, process=forbid_early_end)

    # Three ends that the plain text would run into, and one that ends it inside the block that gets there.
    ends = {plain[0], plain[3], plain[4]}
    eos = (*ends, constrained(tuple(ends))[shortest + 1])
    expected = constrained(eos)
    assert len(expected) == shortest + 2
    assert expected[:shortest] != plain[:shortest]
    drafters = [ReplayDrafter({tuple(prompt): expected}, length, decoys=decoys), PromptLookupDrafter()]
    # Drafts of the unconstrained text hold the forbidden ends.
    drafters.append(ReplayDrafter({tuple(prompt): plain}, length, decoys=decoys))
    for drafter in drafters:
        result = run(
            generator_of("llama", drafter),
            prompt,
            max_new_tokens=24,
            min_new_tokens=shortest,
            eos_token_ids=eos,
        )
        assert list(result.token_ids) == expected
        assert result.finish_reason == "stop"
        assert not set(result.token_ids[:shortest]) & set(eos)


@pytest.mark.parametrize("length", [0, 4, 8])
def test_budget_is_met_to_the_token(length, generator_of, oracle_of):
    """Row 18: `max_new_tokens` 1 to 20: exactly as many ids, usage equal to them, reason `length`."""
    prompt = tuple(PROMPTS[1])
    expected = oracle_of("llama", prompt, 24)
    generator = generator_of("llama", ReplayDrafter({prompt: expected}, length))
    for budget in range(1, 21):
        result = run(generator, prompt, max_new_tokens=budget)
        assert list(result.token_ids) == expected[:budget]
        assert result.finish_reason == "length"
        assert sum(result.statistics.accepted_per_position) == result.statistics.num_accepted_tokens


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mistral-sliding", "gemma3"])
@pytest.mark.parametrize("length", [0, 3, 12])
def test_second_turn_reuses_the_cache_and_equals_a_cold_run(architecture, length, generator_of, oracle_of):
    """Row 19: after an EOS inside a block the cache holds prompt and answer; the next turn starts from it."""
    prompt = tuple(PROMPTS[1])
    first = oracle_of(architecture, prompt, 20)
    end = max(i for i, token_id in enumerate(first[:14]) if token_id not in first[:i])
    generator = generator_of(architecture, ReplayDrafter({prompt: first}, length, decoys=True))
    parameters = SamplingParameters(max_new_tokens=20, eos_token_ids=(first[end],))
    former = generator.open(list(prompt), parameters, keeps_cache=True)
    while not former.sequence.is_finished:
        generator.engine.round()
    assert generator.target.cached_len(former.sequence) == len(prompt) + end
    second_prompt = [*prompt, *first[: end + 1], 11, 12, 13]
    second = generator.open(second_prompt, SamplingParameters(max_new_tokens=12), former=former)
    # The newest token of the first turn was never fed; everything before it is reused.
    assert generator.target.cached_len(second.sequence) == len(prompt) + end
    while not second.sequence.is_finished:
        generator.engine.round()
    assert second.sequence.output_ids == oracle_of(architecture, tuple(second_prompt), 12)


def test_a_second_turn_that_departs_from_the_first_reuses_what_they_share(generator_of, oracle_of):
    """Row 19: the junk of another branch is never continued from."""
    prompt = tuple(PROMPTS[2])
    generator = generator_of("llama", ReplayDrafter({prompt: oracle_of("llama", prompt, 20)}, 6))
    former = generator.open(list(prompt), SamplingParameters(max_new_tokens=9), keeps_cache=True)
    while not former.sequence.is_finished:
        generator.engine.round()
    other = [*prompt[:20], 9, 9, 9]
    second = generator.open(other, SamplingParameters(max_new_tokens=12), former=former)
    assert generator.target.cached_len(second.sequence) == 20
    while not second.sequence.is_finished:
        generator.engine.round()
    assert second.sequence.output_ids == oracle_of("llama", tuple(other), 12)
    assert not generator.target._slots


@pytest.fixture(scope="module")
def short_targets():
    """Models with a context of 32: GPT-2 crashes beyond it, Llama would go on silently."""
    models = {"gpt2": tiny_model("gpt2-short"), "llama": tiny_model("llama")}
    models["llama"].config.max_position_embeddings = 32
    return {name: HuggingFaceTarget(model) for name, model in models.items()}


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("prompt_len", [24, 28, 30, 31])
@pytest.mark.parametrize("decoys", [False, True], ids=["chain", "tree"])
def test_drafts_stay_within_the_context(architecture, prompt_len, decoys, short_targets, tokenizer):
    """Row 20: the draft is clamped to the room left; the text equals the oracle up to the limit."""
    target = short_targets[architecture]
    prompt = PROMPTS[2][:prompt_len]
    expected = greedy_oracle(target.model, prompt, 32 - prompt_len)
    recorded = {tuple(prompt): [*expected, *range(20, 40)]}
    generator = Generator(
        target, tokenizer, ReplayDrafter(recorded, 16, decoys=decoys), num_speculative_tokens=64
    )
    for max_new_tokens in (None, 100):
        result = run(generator, prompt, max_new_tokens=max_new_tokens)
        assert list(result.token_ids) == expected
        assert result.finish_reason == "length"


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("prompt_len", [32, 33, 37])
def test_a_prompt_that_fills_the_context_is_refused(architecture, prompt_len, short_targets, tokenizer):
    """Row 20: a clean refusal, before any forward; the engine serves the next request."""
    generator = Generator(short_targets[architecture], tokenizer, ReplayDrafter({}, 4))
    with pytest.raises(RequestError, match=f"{prompt_len} tokens and the target's context is 32"):
        generator.generate(PROMPTS[2][:prompt_len])
    assert not generator.engine.has_work
    assert len(generator.generate(PROMPTS[1], SamplingParameters(max_new_tokens=3)).token_ids) == 3


@pytest.mark.parametrize("length", [0, 5])
@pytest.mark.parametrize("settings", [{"eos_token_ids": ()}, {"ignore_eos": True}], ids=["none", "ignored"])
def test_without_an_end_the_text_runs_to_the_cap(length, settings, writer, script):
    """Row 22: no EOS at all, or one that is ignored, runs to the cap with `length`."""
    result = run(writer(length), PROMPT, max_new_tokens=len(script) + 9, **settings)
    assert list(result.token_ids) == (script * 2)[: len(script) + 9]
    assert result.finish_reason == "length"


def test_a_model_without_eos_runs_to_the_cap(target_of, tokenizer, oracle_of):
    """Row 22: `eos_token_id` None in model and tokenizer is no end, not an attribute error."""
    from paceline.engine.model_defaults import eos_token_ids

    class Nothing:
        eos_token_id = None

    class Bare:
        config = generation_config = Nothing()

    assert eos_token_ids(Bare(), Nothing()) == []
    generator = Generator(target_of("llama"), tokenizer, ReplayDrafter({}, 4), eos_token_ids=())
    result = run(generator, PROMPTS[1], max_new_tokens=20, min_new_tokens=5)
    assert list(result.token_ids) == oracle_of("llama", tuple(PROMPTS[1]), 20)


@pytest.fixture
def generator(target_of, tokenizer, oracle_of):
    """Three prompts known to the drafter, on a target that holds nothing yet."""
    recorded = {tuple(p): oracle_of("llama", tuple(p), 20) for p in PROMPTS}
    target = HuggingFaceTarget(target_of("llama").model)
    return Generator(target, tokenizer, ReplayDrafter(recorded, 3))


def test_closing_a_stream_frees_its_slot(generator, oracle_of):
    """Cancellation: closed after the first event, the request leaves nothing behind."""
    stream = generator.stream(PROMPTS[2], SamplingParameters(max_new_tokens=20))
    next(stream)
    assert len(generator.target._slots) == 1
    stream.close()
    assert not generator.target._slots
    assert not generator.engine.has_work
    result = generator.generate(PROMPTS[1], SamplingParameters(max_new_tokens=20))
    assert list(result.token_ids) == oracle_of("llama", tuple(PROMPTS[1]), 20)


@pytest.mark.parametrize("cancelled", range(3))
def test_cancelling_one_of_several_leaves_the_others_alone(cancelled, generator, oracle_of):
    """Cancellation: the freed slot is filled by moving another sequence's cache, outside of any round."""
    answers = [generator.open(list(p), SamplingParameters(max_new_tokens=20)) for p in PROMPTS]
    generator.engine.round()
    generator.engine.release(answers[cancelled].sequence)
    assert len(generator.target._slots) == 2
    while generator.engine.has_work:
        generator.engine.round()
    for number, (answer, prompt) in enumerate(zip(answers, PROMPTS, strict=True)):
        expected = oracle_of("llama", tuple(prompt), 20)
        assert answer.sequence.is_finished == (number != cancelled)
        assert answer.sequence.output_ids == expected[: len(answer.sequence.output_ids)]
        assert number == cancelled or len(answer.sequence.output_ids) == 20
    assert not generator.target._slots


def test_cancelling_a_waiting_request_takes_it_out_of_the_queue(generator_of, oracle_of):
    """Cancellation: before its first round."""
    generator = generator_of("llama", max_batch_size=1)
    first, second, third = (generator.open(list(p), SamplingParameters(max_new_tokens=5)) for p in PROMPTS)
    generator.engine.round()
    generator.engine.release(second.sequence)
    while generator.engine.has_work:
        generator.engine.round()
    assert second.sequence.output_ids == []
    for answer, prompt in ((first, PROMPTS[0]), (third, PROMPTS[2])):
        assert answer.sequence.output_ids == oracle_of("llama", tuple(prompt), 20)[:5]


def test_a_batch_with_a_bad_request_leaves_nothing_queued(generator):
    """Cancellation: a request that is refused takes the ones before it along."""
    with pytest.raises(RequestError, match="0 tokens"):
        generator.generate_batch([PROMPTS[1], []])
    assert not generator.engine.has_work


def test_a_refused_second_turn_leaves_the_cache_of_the_first(generator):
    """Cancellation: a bad parameter is found before the former cache is taken over."""
    former = generator.open(PROMPTS[1], SamplingParameters(max_new_tokens=5), keeps_cache=True)
    while not former.sequence.is_finished:
        generator.engine.round()
    with pytest.raises(RequestError, match="token id 96"):
        generator.open(former.sequence.token_ids, SamplingParameters(logit_bias={96: 1.0}), former=former)
    assert generator.target.cached_len(former.sequence) == len(former.sequence) - 1
    generator.engine.release(former.sequence)
    assert not generator.target._slots


@pytest.mark.parametrize("drafter", [ReplayDrafter({}, 2), PromptLookupDrafter()], ids=["replay", "lookup"])
def test_finished_requests_are_forgotten(drafter, generator_of):
    """Cancellation: nothing in generator, engine, target or drafter keeps a finished sequence alive."""
    generator = generator_of("llama", drafter)
    prompt = [9, 8, 7, 6, 5, 4, 3]
    generator.generate(prompt, SamplingParameters(max_new_tokens=5))
    if isinstance(drafter, ReplayDrafter):
        drafter.seen.clear()
    gc.collect()
    assert not [o for o in gc.get_objects() if type(o) is Sequence and o.prompt_ids == prompt]


def test_streams_may_be_read_in_turns(generator, oracle_of):
    """Two streams of one generator: each receives its own events, whichever of them advances the engine."""
    parameters = SamplingParameters(max_new_tokens=20)
    streams = [generator.stream(prompt, parameters) for prompt in PROMPTS[1:]]
    events = [[], []]
    is_open = [True, True]
    while any(is_open):
        for number, stream in enumerate(streams):
            event = next(stream, None)
            is_open[number] = event is not None
            if event is not None:
                events[number].append(event)
    for prompt, own in zip(PROMPTS[1:], events, strict=True):
        assert [i for event in own for i in event.token_ids] == oracle_of("llama", tuple(prompt), 20)
        assert own[-1].result.text == "".join(event.text for event in own)
