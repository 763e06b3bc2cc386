"""Public faults, group F: log-probabilities, usage, streams and rates say what was emitted."""

from __future__ import annotations

import random

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from conftest import PROMPTS
from paceline.engine.generator import Generator
from paceline.sampling import SamplingParameters
from paceline.testing import ReplayDrafter, tiny_model
from stub_target import StubTarget, scripted_law

PROMPT = tuple(PROMPTS[2])
NUM_NEW = 16


@pytest.fixture(scope="module")
def reference(target_of, oracle_of):
    """[NUM_NEW, V] log-probabilities of a plain forward, the rows that predict the oracle's tokens."""
    expected = oracle_of("llama", PROMPT, NUM_NEW)
    with torch.no_grad():
        logits = target_of("llama").model(torch.tensor([[*PROMPT, *expected]])).logits[0]
    return torch.log_softmax(logits[len(PROMPT) - 1 : -1], dim=-1)


@pytest.mark.parametrize("length", range(8))
@pytest.mark.parametrize("decoys", [False, True], ids=["chain", "tree"])
def test_log_probabilities_are_those_of_a_plain_run_for_every_block_size(
    length, decoys, generator_of, oracle_of, reference
):
    """Row 40: own values and top alternatives of accepted, recovered and bonus tokens, no placeholders."""
    expected = oracle_of("llama", PROMPT, NUM_NEW)
    for wrong in (None, 1, 3):
        drafter = ReplayDrafter({PROMPT: expected}, length, wrong=wrong, decoys=decoys)
        result = generator_of("llama", drafter).generate(
            list(PROMPT), SamplingParameters(max_new_tokens=NUM_NEW, logprobs=2)
        )
        assert [entry.token_id for entry in result.log_probs] == expected
        for entry, row in zip(result.log_probs, reference, strict=True):
            top = row.topk(2)
            assert entry.log_prob == pytest.approx(float(row[entry.token_id]), abs=1e-3)
            assert list(entry.top) == top.indices.tolist()
            assert list(entry.top.values()) == pytest.approx(top.values.tolist(), abs=1e-3)


@pytest.mark.parametrize("parameters", [{"logit_bias": {7: 40.0}}, {"temperature": 0.3, "seed": 1}], ids=str)
def test_log_probabilities_are_the_targets_own_unprocessed_ones(parameters, generator_of, target_of):
    """Row 40: neither penalties nor temperature show in them; a batch does not mix its rows up."""
    asks = SamplingParameters(max_new_tokens=6, logprobs=0, **parameters)
    results = generator_of("llama").generate_batch([list(PROMPT), PROMPTS[1]], [asks, SamplingParameters()])
    result = results[0]
    with torch.no_grad():
        logits = target_of("llama").model(torch.tensor([[*PROMPT, *result.token_ids]])).logits[0]
    rows = torch.log_softmax(logits[len(PROMPT) - 1 : -1], dim=-1)
    own = rows.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
    assert [entry.log_prob for entry in result.log_probs] == pytest.approx(own.tolist(), abs=1e-3)
    assert results[1].log_probs is None


@pytest.fixture(scope="module")
def byte_tokenizer():
    """One token per byte, as the rarest characters have them, and an end."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate([*symbols, "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def writer(tokenizer, script, length, **settings):
    """A Generator that writes `script` after the prompt [0], drafting `length` tokens of it a round."""
    size = len(tokenizer)
    target = StubTarget(scripted_law([0], script, size), size)
    drafter = ReplayDrafter({(0,): script}, length, vocab_size=size)
    return Generator(target, tokenizer, drafter, eos_token_ids=(tokenizer.eos_token_id,), **settings)


@pytest.mark.parametrize("length", [1, 2, 7, 50])
def test_a_block_with_text_and_end_streams_both(length, byte_tokenizer):
    """Row 42: the last block's text reaches the stream although it holds the EOS as well; usage is equal."""
    script = [*byte_tokenizer("The capital of France is Paris.")["input_ids"], byte_tokenizer.eos_token_id]
    generator = writer(byte_tokenizer, script, length)
    events = list(generator.stream([0]))
    assert "".join(event.text for event in events) == "The capital of France is Paris."
    result = generator.generate([0])
    assert events[-1].result.text == result.text
    assert events[-1].result.token_ids == result.token_ids == tuple(script)
    assert events[-1].result.finish_reason == result.finish_reason == "stop"
    assert sum(len(event.token_ids) for event in events) == result.statistics.num_output_tokens
    assert all(len(event.origins) == len(event.token_ids) for event in events)


@pytest.mark.parametrize("length", [0, 1, 2, 4, 5])
@pytest.mark.parametrize("cap", [44, 45, 46, 47, 48])
def test_characters_are_never_cut_in_the_stream(length, cap, byte_tokenizer):
    """Row 43: emoji of four bytes and letters of two, blocks and caps at every offset."""
    script = byte_tokenizer("\U0001f31f\u00e9\U0001f31f" * 6)["input_ids"]
    events = list(writer(byte_tokenizer, script, length).stream([0], SamplingParameters(max_new_tokens=cap)))
    pieces = [event.text for event in events]
    assert "\ufffd" not in "".join(pieces[:-1])
    assert "".join(pieces) == byte_tokenizer.decode(script[:cap]) == events[-1].result.text


@pytest.mark.parametrize("wrong", [None, 0, 2])
def test_parallel_requests_equal_their_solo_runs_in_any_order_of_arrival(wrong, generator_of, oracle_of):
    """Row 45: eight requests of different prompts, drafts, seeds, stops and lengths; three run at a time."""
    prompts = [PROMPTS[i % 3] for i in range(8)]
    texts = {tuple(p): oracle_of("llama", tuple(p), 24) for p in PROMPTS}
    parameters = [
        SamplingParameters(max_new_tokens=17),
        SamplingParameters(max_new_tokens=12, temperature=1.0, seed=3),
        SamplingParameters(max_new_tokens=20, eos_token_ids=(texts[tuple(PROMPTS[2])][6],)),
        SamplingParameters(max_new_tokens=9, temperature=0.7, top_k=5, seed=3, logprobs=1),
        SamplingParameters(max_new_tokens=15, repetition_penalty=1.5),
        SamplingParameters(max_new_tokens=20, stop=("a", "th")),
        SamplingParameters(max_new_tokens=1),
        SamplingParameters(max_new_tokens=14, logprobs=3, no_repeat_ngram_size=2),
    ]
    generator = generator_of("llama", ReplayDrafter(texts, 4, wrong=wrong, decoys=True), max_batch_size=3)
    alone = [generator.generate(p, own) for p, own in zip(prompts, parameters, strict=True)]
    for seed in range(4):
        arrivals = list(range(8))
        random.Random(seed).shuffle(arrivals)
        answers, results = {}, {}
        while arrivals or generator.engine.has_work:
            # One or two requests arrive between rounds.
            for _ in range(min(1 + seed % 2, len(arrivals))):
                number = arrivals.pop()
                answers[number] = generator.open(prompts[number], parameters[number])
            for outcome in generator.engine.round():
                number = next(n for n, answer in answers.items() if answer.sequence is outcome.sequence)
                event = answers[number].advance(outcome)
                if event.result is not None:
                    results[number] = event.result
        for number, expected in enumerate(alone):
            found = results[number]
            assert found.token_ids == expected.token_ids
            assert (found.text, found.finish_reason) == (expected.text, expected.finish_reason)
            if expected.log_probs is not None:
                own = [entry.log_prob for entry in found.log_probs]
                assert own == pytest.approx([entry.log_prob for entry in expected.log_probs], abs=1e-3)


class SpoiltDrafter(ReplayDrafter):
    """Four drafts a round, wrong at the given positions, each wrong one followed by the true text."""

    def __init__(self, recorded, spoilt):
        super().__init__(recorded, 4)
        self.spoilt = spoilt

    def _tree(self, sequence):
        from paceline.tree import DraftTree

        done = len(sequence.output_ids)
        chain = list(self.recorded[tuple(sequence.prompt_ids)][done : done + 4])
        chain = [self._other(t) if i in self.spoilt else t for i, t in enumerate(chain)]
        return DraftTree.from_chain(sequence.last_token_id, chain)


@pytest.mark.parametrize(
    ("spoilt", "rate", "per_round"),
    [((2,), 0.5, 3), ((1, 3), 0.25, 2), ((0,), 0.0, 1), ((), 1.0, 5)],
    ids=["third", "second and fourth", "first", "none"],
)
def test_nothing_behind_the_first_rejection_counts(spoilt, rate, per_round, tokenizer):
    """Row 48: ten rounds of four drafts; the rate lies in [0, 1], tokens come from usage, not from events."""
    script = [(7 * i) % 89 + 3 for i in range(200)]
    target = StubTarget(scripted_law([5], script, 96), 96)
    generator = Generator(target, tokenizer, SpoiltDrafter({(5,): script}, spoilt))
    parameters = SamplingParameters(max_new_tokens=10 * per_round)
    events = list(generator.stream([5], parameters))
    statistics = events[-1].result.statistics
    # The last drafts are cut to the room that is left, of which the target's own token takes one.
    drafted = sum(min(4, per_round * left - 1) for left in range(1, 11))
    assert statistics.num_rounds == len(events) == 10
    assert statistics.num_draft_tokens == sum(event.num_draft_tokens for event in events) == drafted
    whole = [event for event in events if event.num_draft_tokens == 4]
    assert len(whole) >= 6
    assert sum(event.origins.count("drafted") for event in whole) == rate * 4 * len(whole)
    assert statistics.mean_acceptance_length == per_round
    assert statistics.accepted_per_round == per_round - 1
    assert 0 <= statistics.acceptance_rate <= 1
    assert statistics.acceptance_rate == pytest.approx(10 * (per_round - 1) / drafted)
    assert statistics.num_output_tokens == 10 * per_round
    assert statistics.accepted_per_position == [10] * (per_round - 1)
    assert statistics.tokens_per_second == pytest.approx(10 * per_round / statistics.seconds)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_log_probabilities_are_finite_and_close(dtype, tokenizer, reference, oracle_of):
    """Row 40: computed in fp32 from half-precision logits."""
    from paceline.targets.huggingface import HuggingFaceTarget

    generator = Generator(HuggingFaceTarget(tiny_model(dtype=dtype)), tokenizer, ReplayDrafter({}, 0))
    forced = dict.fromkeys(range(96), 0.0)
    result = generator.generate(
        list(PROMPT), SamplingParameters(max_new_tokens=1, logprobs=20, logit_bias=forced)
    )
    row = reference[0]
    likely = [i for i in result.log_probs[0].top if float(row[i]) > -4]
    assert likely
    for token_id in likely:
        assert result.log_probs[0].top[token_id] == pytest.approx(float(row[token_id]), abs=0.3)
