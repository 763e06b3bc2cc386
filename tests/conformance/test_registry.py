"""Every registered drafter with every registered verifier; pairs that cannot work are refused."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

from conftest import PROMPTS
from paceline import registry
from paceline.engine.generator import Generator
from paceline.engine.load import load
from paceline.errors import ConfigError, UnsupportedFeatureError
from paceline.registry import (
    NamedDrafter,
    drafter_class,
    drafter_names,
    split_drafter,
    verifier_class,
    verifier_names,
)
from paceline.relaxation import Relaxation
from paceline.sampling import SamplingParameters
from paceline.testing import TINY_ARCHITECTURES, ReplayDrafter

NUM_NEW = 24
GREEDY = SamplingParameters(max_new_tokens=NUM_NEW)
SAMPLED = SamplingParameters(max_new_tokens=NUM_NEW, temperature=0.9, top_k=20, seed=7)
# What each verifier decodes, and whether it writes the target's own text.
REQUESTS = {"greedy": GREEDY, "sampling": SAMPLED, "budgeted": GREEDY, "typical": GREEDY, "margin": GREEDY}
# Limits under which nothing is relaxed, and some under which much is, in logits of tiny models.
STRICT = Relaxation(risk_budget=0.0, typical_epsilon=1.0, typical_delta=1e9, max_regret=0.0)
LOOSE = Relaxation(
    risk_budget=30.0, max_regret_per_value=1e3, regret_price=0.0, typical_epsilon=1e-4, max_regret=1e3
)
LOSSLESS = [name for name in verifier_names() if verifier_class(name).lossless]
LOSSY = sorted({*verifier_names()} - {*LOSSLESS})
ARCHITECTURES = sorted(set(TINY_ARCHITECTURES) - {"gpt2-short"})


@pytest.fixture
def head_for(phrase_head_of, eagle_head_of):
    """Folder of a head for a tiny target, where the drafter of that name needs one."""

    def find(name, architecture):
        if name.startswith("phrase"):
            return phrase_head_of(architecture)
        return eagle_head_of(architecture) if name.startswith("eagle") else None

    return find


@pytest.fixture
def build_drafter(target_of, head_for):
    """A registered drafter for a tiny target."""

    def build(name, architecture):
        return drafter_class(name).build(target_of(architecture), head_for(name, architecture), 16)

    return build


@pytest.mark.parametrize("drafter", drafter_names())
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_ids_are_those_of_the_oracle(
    architecture, drafter, build_drafter, target_of, tokenizer, oracle_of
):
    """Alone and in a batch; that the oracle's ids are those of `generate` is shown in test_greedy.py."""
    generator = Generator(
        target_of(architecture),
        tokenizer,
        build_drafter(drafter, architecture),
        verifier="greedy",
        num_speculative_tokens=16,
    )
    expected = [oracle_of(architecture, tuple(prompt), NUM_NEW) for prompt in PROMPTS]
    alone = [generator.generate(prompt, GREEDY) for prompt in PROMPTS]
    together = generator.generate_batch(PROMPTS, GREEDY)
    for results in (alone, together):
        assert [list(result.token_ids) for result in results] == expected
    assert (sum(r.statistics.num_draft_tokens for r in alone) > 0) == (drafter != "none")
    if drafter.startswith("phrase"):
        assert sum(result.statistics.num_accepted_tokens for result in alone) >= 10


@pytest.mark.parametrize("verifier", verifier_names())
@pytest.mark.parametrize("drafter", drafter_names())
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "mistral-sliding"])
def test_every_pair_writes_the_text_of_plain_decoding(
    architecture, drafter, verifier, build_drafter, target_of, tokenizer
):
    """The same text as without drafting, in batches of one and of three; lossy ones under strict limits."""
    asked = replace(REQUESTS[verifier], relaxation=STRICT)

    def answers(name, batch_size):
        generator = Generator(
            target_of(architecture),
            tokenizer,
            build_drafter(name, architecture),
            verifier=verifier,
            max_batch_size=batch_size,
        )
        results = generator.generate_batch(PROMPTS, asked)
        return [(result.token_ids, result.text, result.finish_reason) for result in results]

    expected = answers("none", 1)
    assert answers(drafter, 1) == answers(drafter, 3) == expected


@pytest.mark.parametrize("verifier", LOSSY)
@pytest.mark.parametrize("drafter", drafter_names())
def test_lossy_verifiers_stream_what_they_account_for(
    drafter, verifier, build_drafter, target_of, oracle_of, tokenizer
):
    """Streamed and in one piece the same; every relaxed token is marked, counted and charged."""
    generator = Generator(
        target_of("llama"), tokenizer, build_drafter(drafter, "llama"), verifier=verifier, max_batch_size=3
    )
    asked = replace(GREEDY, relaxation=LOOSE)
    num_relaxed = 0
    for prompt, whole in zip(PROMPTS, generator.generate_batch(PROMPTS, asked), strict=True):
        events = list(generator.stream(prompt, asked))
        result = events[-1].result
        assert "".join(event.text for event in events) == result.text
        assert (result.token_ids, result.text) == (whole.token_ids, whole.text)
        origins = [origin for event in events for origin in event.origins]
        statistics = result.statistics
        assert statistics.num_relaxed_tokens == origins.count("relaxed") <= statistics.num_accepted_tokens
        assert sum(statistics.refusals.values()) == statistics.num_rounds
        if verifier == "budgeted":
            assert statistics.regret_spent <= LOOSE.risk_budget + 1e-6
        if not statistics.num_relaxed_tokens:
            assert list(result.token_ids) == oracle_of("llama", tuple(prompt), NUM_NEW)
        num_relaxed += statistics.num_relaxed_tokens
    # Copying and phrases both propose tokens that are not the argmax.
    assert (num_relaxed > 0) == (drafter != "none")


@pytest.mark.parametrize("drafter", drafter_names())
@pytest.mark.parametrize(
    ("verifier", "temperature", "message"),
    [
        ("greedy", 0.7, "verifier 'greedy' cannot serve temperature 0.7"),
        ("sampling", 0.0, "verifier 'sampling' cannot serve temperature 0"),
        ("budgeted", 0.7, "verifier 'budgeted' cannot serve temperature 0.7"),
        ("typical", 0.7, "verifier 'typical' cannot serve temperature 0.7"),
        ("margin", 0.7, "verifier 'margin' cannot serve temperature 0.7"),
    ],
)
def test_verifiers_refuse_temperatures_that_they_cannot_serve(
    drafter, verifier, temperature, message, build_drafter, target_of, tokenizer
):
    """An explicit mismatch is an error, and leaves nothing behind; the right temperature is then served."""
    generator = Generator(target_of("llama"), tokenizer, build_drafter(drafter, "llama"), verifier=verifier)
    with pytest.raises(UnsupportedFeatureError, match=message):
        generator.generate(PROMPTS[1], SamplingParameters(temperature=temperature))
    assert not generator.engine.has_work
    assert generator.generate(PROMPTS[1], REQUESTS[verifier]).token_ids


@pytest.mark.parametrize(("parameters", "chosen"), [(GREEDY, "greedy"), (SAMPLED, "sampling")])
def test_temperature_chooses_the_verifier(parameters, chosen, generator_of):
    generator = generator_of("llama")
    answer = generator.open(PROMPTS[1], parameters)
    generator.engine.round()
    assert list(generator.engine._verifiers) == [chosen]
    generator.engine.release(answer.sequence)


def test_both_verifiers_serve_one_batch(generator_of, oracle_of):
    """Rows of one forward may be verified differently."""
    recorded = {tuple(p): oracle_of("llama", tuple(p), NUM_NEW) for p in PROMPTS}
    generator = generator_of("llama", ReplayDrafter(recorded, 4, decoys=True))
    asked = [GREEDY, SAMPLED, GREEDY]
    alone = [generator.generate(p, own).token_ids for p, own in zip(PROMPTS, asked, strict=True)]
    assert [r.token_ids for r in generator.generate_batch(PROMPTS, asked)] == alone


@pytest.mark.parametrize("drafter", drafter_names())
def test_a_head_that_does_not_belong_to_the_drafter_is_refused(drafter, target_of, tokenizer, tmp_path):
    """`none` and `prompt_lookup` have no head; the others need one, and say where it comes from."""
    model = target_of("llama").model
    kind = {"phrase": "phrase", "eagle3": "EAGLE"}.get(drafter.split("+")[0].split(":")[0])
    if kind is not None:
        with pytest.raises(ConfigError, match=f"no {kind} head is shipped for this target"):
            load(model=model, tokenizer=tokenizer, drafter=drafter)
    else:
        with pytest.raises(ConfigError, match=f"drafter '{drafter}' has no trained head"):
            load(model=model, tokenizer=tokenizer, drafter=drafter, head=tmp_path)


@pytest.mark.parametrize(
    ("kind", "name", "nearest"), [("drafter", "fraze", "phrase"), ("verifier", "gredy", "greedy")]
)
def test_unknown_names_are_refused_before_a_model_is_touched(kind, name, nearest, tokenizer):
    with pytest.raises(ConfigError, match=f"unknown {kind} '{name}': did you mean '{nearest}'"):
        load(model=object(), tokenizer=tokenizer, **{"drafter": "none", kind: name})


def test_entry_points_add_drafters_but_never_replace_built_in_ones(
    monkeypatch, target_of, tokenizer, oracle_of
):
    """A package's own drafter is found by its entry point and runs in the same loop."""
    added = [
        EntryPoint("replay", "paceline.testing:ReplayDrafter", "paceline.drafters"),
        EntryPoint("none", "paceline.testing:ReplayDrafter", "paceline.drafters"),
        EntryPoint("number", "paceline.testing:TINY_VOCAB", "paceline.drafters"),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: [e for e in added if e.group == group])
    assert "replay" in drafter_names()
    assert drafter_class("none").__name__ == "NoDrafter"
    with pytest.raises(ConfigError, match="not a class"):
        drafter_class("number")
    generator = load(model=target_of("llama").model, tokenizer=tokenizer, drafter="replay")
    assert isinstance(generator.drafter, ReplayDrafter)
    result = generator.generate(PROMPTS[1], SamplingParameters(max_new_tokens=NUM_NEW, eos_token_ids=()))
    assert list(result.token_ids) == oracle_of("llama", tuple(PROMPTS[1]), NUM_NEW)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "granite", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_decodes_with_every_drafter(architecture, dtype, target_of, tokenizer, head_for):
    """No NaN: log-probabilities are finite, and drafting changes tokens at near-ties only."""
    from paceline.bench.near_ties import first_difference, logit_gaps, width_noise

    target = target_of(architecture, dtype=dtype)
    answers = {}
    for name in drafter_names():
        drafter = drafter_class(name).build(target, head_for(name, architecture), 16)
        generator = Generator(target, tokenizer, drafter)
        answers[name] = generator.generate(PROMPTS[2], SamplingParameters(max_new_tokens=40, logprobs=1))
        assert all(entry.log_prob <= 0 for entry in answers[name].log_probs)
    plain = answers["none"].token_ids
    noise = width_noise(target.model, [[*PROMPTS[2], *plain]])
    for result in answers.values():
        position = first_difference(result.token_ids, plain)
        if position is not None:
            prefix = [*PROMPTS[2], *plain[:position]]
            _, gap = logit_gaps(target.model, prefix, result.token_ids[position], plain[position])
            assert gap <= noise


def test_drafters_are_named_with_a_folder_behind_a_colon():
    """Also those whose name holds one itself."""
    assert split_drafter("none") == NamedDrafter("none", None)
    assert split_drafter("phrase:heads/a") == NamedDrafter("phrase", Path("heads/a"))
    assert split_drafter("eagle3:static") == NamedDrafter("eagle3:static", None)
    assert split_drafter("eagle3:static:heads/b") == NamedDrafter("eagle3:static", Path("heads/b"))
    for text in ("fraze:heads/a", "eagle3:heads/b"):
        with pytest.raises(ConfigError, match="unknown drafter"):
            split_drafter(text)
