"""Captured forwards through the whole engine: the ids of `model.generate`, whatever is drafted or batched."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from conftest import PROMPTS
from graph_stand_ins import RecordedGraphs, Uncaptured
from paceline.drafters.none import NoDrafter
from paceline.drafters.phrase import PhraseDrafter
from paceline.drafters.prompt_lookup import PromptLookupDrafter
from paceline.engine.conversation import Conversation
from paceline.engine.generator import Generator
from paceline.engine.prefill import FixedPace
from paceline.heads.checkpoint import LoadedHead
from paceline.heads.phrase import PhraseHead, PhraseHeadConfig
from paceline.sampling import SamplingParameters
from paceline.targets.huggingface import HuggingFaceTarget
from paceline.testing import TINY_ARCHITECTURES, ReplayDrafter, tiny_model
from paceline.training.distill import RecordingDrafter
from paceline.vocabularies.phrases import PhraseVocabulary

NUM_NEW = 20
GREEDY = SamplingParameters(max_new_tokens=NUM_NEW)
ARCHITECTURES = sorted(set(TINY_ARCHITECTURES) - {"gpt2-short"})
REPEATED = [9, 10, 11, 12, 13, 9, 10, 11, 12, 13, 9, 10]
ALL_PROMPTS = [*map(list, PROMPTS), REPEATED, [60, 61]]


@cache
def target_of(architecture: str) -> HuggingFaceTarget:
    target = HuggingFaceTarget(tiny_model(architecture), execution="fast", graphs=RecordedGraphs())
    assert target.execution == "fast"
    return target


@cache
def generated(architecture: str, prompt: tuple[int, ...], num_new: int = NUM_NEW) -> list[int]:
    """What Hugging Face's own loop writes."""
    reference = target_of(architecture).model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=num_new,
        do_sample=False,
        eos_token_id=None,
    )
    return reference[0, len(prompt) :].tolist()


def drafters_of(architecture: str):
    recorded = {tuple(p): generated(architecture, tuple(p)) for p in ALL_PROMPTS}
    # The second prompt is never drafted right, so the sequences advance at different speeds.
    ragged = {**recorded, tuple(PROMPTS[1]): [0] * NUM_NEW}
    return {
        "none": NoDrafter(),
        "prompt_lookup": PromptLookupDrafter.build(target_of(architecture), None, 8),
        "chain": ReplayDrafter(recorded, 3, wrong=2),
        "tree": ReplayDrafter(ragged, 4, decoys=True),
    }


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5])
@pytest.mark.parametrize("drafter", ["none", "prompt_lookup", "chain", "tree"])
@pytest.mark.parametrize("architecture", ["llama", "mistral-sliding", "gemma3", "gpt2", "llama-wide-heads"])
def test_ids_are_those_of_generate(architecture, drafter, batch_size, tokenizer):
    target = target_of(architecture)
    generator = Generator(
        target,
        tokenizer,
        drafters_of(architecture)[drafter],
        num_speculative_tokens=16,
        max_batch_size=batch_size,
    )
    replays = target._static._capture.num_replays
    results = generator.generate_batch(ALL_PROMPTS, GREEDY)
    assert [list(r.token_ids) for r in results] == [generated(architecture, tuple(p)) for p in ALL_PROMPTS]
    assert target._static._capture.num_replays > replays
    assert target.execution == "fast"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_writes_the_ids_of_generate(architecture, tokenizer):
    """Three of five at once, so that sequences leave their slots to others while prompts arrive."""
    generator = Generator(
        target_of(architecture), tokenizer, drafters_of(architecture)["tree"], max_batch_size=3
    )
    generator.engine.pace = FixedPace(7)
    lengths = [9, NUM_NEW, 13, 5, NUM_NEW]
    parameters = [SamplingParameters(max_new_tokens=length) for length in lengths]
    results = generator.generate_batch(ALL_PROMPTS, parameters)
    for prompt, length, result in zip(ALL_PROMPTS, lengths, results, strict=True):
        assert list(result.token_ids) == generated(architecture, tuple(prompt))[:length]


def test_text_past_the_first_view_and_the_first_buffer(tokenizer):
    """Views and buffers grow while the sequences run."""
    model = tiny_model("llama", max_position_embeddings=4096)
    graphs = RecordedGraphs()
    target = HuggingFaceTarget(model, execution="fast", graphs=graphs)
    prompt = [(11 * i * i + 3 * i) % 93 + 3 for i in range(880)]
    long = SamplingParameters(max_new_tokens=30)
    eager = Generator(HuggingFaceTarget(model), tokenizer, NoDrafter())
    expected = [list(eager.generate(p, long).token_ids) for p in (prompt, PROMPTS[1])]
    for drafter in (NoDrafter(), ReplayDrafter({tuple(prompt): expected[0]}, 4, decoys=True)):
        results = Generator(target, tokenizer, drafter).generate_batch([prompt, PROMPTS[1]], long)
        assert [list(r.token_ids) for r in results] == expected
    assert graphs.num_forgotten > 0


def random_head(target, tokenizer, **settings):
    texts = [generated("llama", tuple(p)) for p in ALL_PROMPTS]
    vocabulary = PhraseVocabulary.mine(texts * 2, tokenizer, num_entries=100, criterion="count")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = PhraseHead(PhraseHeadConfig(target.hidden_size, len(vocabulary), width=16, **settings)).eval()
    return LoadedHead(head, vocabulary, head.config, {"target_fingerprint": target.fingerprint})


def test_a_phrase_drafter_that_reads_layers_drafts_as_on_the_eager_path(tokenizer):
    """Layer inputs come out of captured forwards; the drafts made of them are the same."""
    found = []
    for target in (target_of("llama"), HuggingFaceTarget(target_of("llama").model)):
        head = random_head(target, tokenizer, feature_layers=(0, 1))
        generator = Generator(target, tokenizer, PhraseDrafter(target, head), num_speculative_tokens=12)
        results = generator.generate_batch(ALL_PROMPTS, GREEDY)
        assert [list(r.token_ids) for r in results] == [generated("llama", tuple(p)) for p in ALL_PROMPTS]
        found.append([(r.statistics.num_rounds, r.statistics.num_draft_tokens) for r in results])
    assert found[0] == found[1]


def test_recorded_states_are_those_of_the_eager_path(tokenizer):
    """What is kept for training is not overwritten by later forwards."""
    found = []
    for target in (target_of("mistral-sliding"), HuggingFaceTarget(target_of("mistral-sliding").model)):
        drafter = RecordingDrafter(drafters_of("mistral-sliding")["tree"], (1,), dtype=torch.float32)
        generator = Generator(target, tokenizer, drafter, num_speculative_tokens=12)
        answers = [generator.open(list(p), GREEDY) for p in ALL_PROMPTS]
        while generator.engine.has_work:
            generator.engine.round()
        found.append([drafter.take(answer.sequence) for answer in answers])
    for ours, reference in zip(*found, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-3, atol=1e-3 * float(reference.abs().max()))


def test_a_conversation_keeps_its_slot_while_others_run(tokenizer):
    """Its cache rests beside the batch and is taken up again."""
    static, eager = target_of("llama"), HuggingFaceTarget(target_of("llama").model)
    answers = []
    for target in (static, eager):
        generator = Generator(target, tokenizer, NoDrafter())
        conversation = Conversation(generator, parameters=SamplingParameters(max_new_tokens=8))
        first = conversation.ask("the cat").token_ids
        between = [r.token_ids for r in generator.generate_batch(ALL_PROMPTS, GREEDY)]
        second = conversation.ask("and then").token_ids
        conversation.close()
        answers.append((first, between, second))
    assert answers[0] == answers[1]


def test_half_precision_follows_the_eager_path_closely(tokenizer):
    """bf16: the check at load time holds, and the text goes on; equality is not promised."""
    target = HuggingFaceTarget(
        tiny_model("gemma3", dtype=torch.bfloat16), execution="fast", graphs=Uncaptured()
    )
    results = Generator(target, tokenizer, NoDrafter()).generate_batch(ALL_PROMPTS, GREEDY)
    assert all(len(r.token_ids) == NUM_NEW for r in results)
