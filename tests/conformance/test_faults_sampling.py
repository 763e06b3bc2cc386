"""Public faults, group E: sampling follows the target's law, processors act everywhere, seeds count."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from chi_square import chi_square, chi_square_limit
from conftest import PROMPTS
from paceline.engine.speculate import SpeculativeEngine
from paceline.errors import ConfigError, RequestError, UnsupportedFeatureError
from paceline.sampling import SamplingParameters
from paceline.sequence import Sequence
from paceline.testing import ReplayDrafter, greedy_oracle
from paceline.tree import DraftTree
from stub_target import StubTarget

# The verifier's own tests draw 20,000 times; here every request passes through the whole engine.
NUM_REQUESTS = 5_000
LAW = torch.tensor([0.5, 0.3, 0.2])


class PathsDrafter(ReplayDrafter):
    """Drafts the same paths at every round."""

    def __init__(self, paths):
        super().__init__({}, 0)
        self.paths = paths

    def _tree(self, sequence):
        return DraftTree.from_paths(sequence.last_token_id, self.paths)


def first_tokens(paths, law, num_tokens, **parameters):
    """[NUM_REQUESTS, num_tokens] ids emitted for seeds 0, 1, ... in large batches by the engine."""
    target = StubTarget(law, len(law(())))
    engine = SpeculativeEngine(target, PathsDrafter(paths), max_batch_size=2000, prefill_chunk=2000)
    settings = SamplingParameters(max_new_tokens=num_tokens, **parameters)
    sequences = [Sequence([0], settings, frozenset(), 100, seed) for seed in range(NUM_REQUESTS)]
    for sequence in sequences:
        engine.submit(sequence)
    while engine.has_work:
        engine.round()
    return torch.tensor([sequence.output_ids for sequence in sequences])


def assert_follows(drawn, law):
    counts = torch.bincount(drawn, minlength=len(law)).double()
    assert not counts[law == 0].any()
    possible = law > 0
    statistic = chi_square(counts[possible], law[possible].double() * len(drawn))
    assert statistic < chi_square_limit(int(possible.sum()) - 1), counts / len(drawn)


@pytest.mark.parametrize("paths", [[], [[0]], [[2], [1]], [[0], [1], [2]]], ids=str)
def test_first_token_follows_the_target_whatever_is_drafted(paths):
    """Row 31: p = (.5, .3, .2), drafter always token 0: the fault gives (.83, 0, .17)."""
    drawn = first_tokens(paths, lambda _: LAW.log(), 1, temperature=1.0)
    assert_follows(drawn[:, 0], LAW)


@pytest.mark.parametrize(
    ("parameters", "law"),
    [
        ({"temperature": 1.0, "top_k": 2}, torch.tensor([0.625, 0.375, 0.0])),
        ({"temperature": 0.7}, torch.softmax(LAW.log() / 0.7, dim=0)),
        ({"temperature": 0.7, "top_k": 2}, torch.tensor([*torch.softmax(LAW[:2].log() / 0.7, dim=0), 0.0])),
        ({"temperature": 1.0, "top_p": 0.75}, torch.tensor([0.625, 0.375, 0.0])),
        ({"temperature": 1.0, "min_p": 0.5}, torch.tensor([0.625, 0.375, 0.0])),
    ],
    ids=["top-k", "temperature", "both", "top-p", "min-p"],
)
def test_filters_and_temperature_act_on_the_law_that_drafts_are_tested_against(parameters, law):
    """Row 31: a greedy draft against the filtered law."""
    drawn = first_tokens([[0]], lambda _: LAW.log(), 1, **parameters)
    assert_follows(drawn[:, 0], law)


def test_prefixes_with_many_leaves_are_not_favoured():
    """Row 32: leaves ab ac ad ef, p(a) = p(e) = .5: the first token is a with .5, not with .875."""
    a, b, c, d, e, f = range(6)
    after_a = torch.tensor([0, 0.2, 0.3, 0.5, 0, 0])
    after_e = torch.tensor([0, 0.6, 0, 0, 0, 0.4])

    def law(ids):
        newest = ids[1:][-1:]
        if not newest:
            return torch.tensor([0.5, 0, 0, 0, 0.5, 0]).log()
        return {(a,): after_a, (e,): after_e}.get(newest, torch.ones(6)).log()

    drawn = first_tokens([[a, b], [a, c], [a, d], [e, f]], law, 2, temperature=1.0)
    assert_follows(drawn[:, 0], torch.tensor([0.5, 0, 0, 0, 0.5, 0]))
    assert_follows(drawn[drawn[:, 0] == a, 1], after_a)
    assert_follows(drawn[drawn[:, 0] == e, 1], after_e)


def repetition(amount):
    def process(logits, ids):
        seen = sorted(set(ids))
        values = logits[seen]
        logits[seen] = torch.where(values < 0, values * amount, values / amount)
        return logits

    return process


def occurrences(presence, frequency, prompt_len):
    def process(logits, ids):
        counts = torch.bincount(torch.tensor(ids[prompt_len:], dtype=torch.int64), minlength=len(logits))
        return logits - counts * frequency - (counts > 0) * presence

    return process


def bias(amounts):
    def process(logits, ids):
        for token_id, amount in amounts.items():
            logits[token_id] += amount
        return logits

    return process


def no_repeat(size):
    def process(logits, ids):
        for start in range(len(ids) - size + 1):
            if ids[start : start + size - 1] == ids[len(ids) - size + 1 :]:
                logits[ids[start + size - 1]] = float("-inf")
        return logits

    return process


def without(words):
    def process(logits, ids):
        for word in words:
            if len(word) == 1 or tuple(ids[-(len(word) - 1) :]) == word[:-1]:
                logits[word[-1]] = float("-inf")
        return logits

    return process


# Tiny models hardly repeat themselves. With these four tokens far ahead of all others they do nothing else,
# so whatever a processor does to a token that was drafted shortly before shows.
FIRST, SECOND, THIRD, FOURTH = [i for i in range(3, 96) if i not in PROMPTS[2]][:4]
FAVOURITES = dict.fromkeys((FIRST, SECOND, THIRD, FOURTH), 12.0)
BAD_WORDS = ((FIRST,), (SECOND, THIRD), (90, 91, 92))
NUM_PROMPT = len(PROMPTS[2])
PROCESSORS = {
    "none": ({}, lambda logits, ids: logits),
    "repetition": ({"repetition_penalty": 1.8}, repetition(1.8)),
    "presence": ({"presence_penalty": 2.0}, occurrences(2.0, 0.0, NUM_PROMPT)),
    "frequency +2": ({"frequency_penalty": 2.0}, occurrences(0.0, 2.0, NUM_PROMPT)),
    "frequency -2": ({"frequency_penalty": -2.0}, occurrences(0.0, -2.0, NUM_PROMPT)),
    "n-grams": ({"no_repeat_ngram_size": 2}, no_repeat(2)),
    "bad words": ({"bad_words": BAD_WORDS}, without(BAD_WORDS)),
}


@pytest.fixture(scope="module")
def processed(target_of):
    """Name -> the oracle's ids under the same bias and processor."""
    favour = bias(FAVOURITES)

    def written(process):
        def favour_and_process(logits, ids):
            return process(favour(logits, ids), ids)

        return greedy_oracle(target_of("llama").model, PROMPTS[2], 20, process=favour_and_process)

    return {name: written(process) for name, (_, process) in PROCESSORS.items()}


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_act_at_every_drafted_position_as_in_plain_decoding(
    name, processed, generator_of, oracle_of
):
    """Row 33: the output is the oracle's with the same processors, whatever is drafted, not the plain one."""
    prompt = tuple(PROMPTS[2])
    expected, favoured, plain = processed[name], processed["none"], oracle_of("llama", prompt, 24)
    assert expected != (plain[:20] if name == "none" else favoured)
    parameters = SamplingParameters(max_new_tokens=20, logit_bias=FAVOURITES, **PROCESSORS[name][0])
    for recorded in (expected, favoured, plain):
        for settings in ({"length": 4}, {"length": 5, "wrong": 3, "decoys": True}):
            drafter = ReplayDrafter({prompt: recorded}, **settings)
            result = generator_of("llama", drafter).generate(list(prompt), parameters)
            assert list(result.token_ids) == expected


def test_opposite_penalties_differ(processed):
    """Row 33: a sign that is lost would make them equal."""
    assert processed["frequency +2"] != processed["frequency -2"]


@pytest.mark.parametrize(
    "changes",
    [{"logit_bias": {96: 1.0}}, {"bad_words": ((3, -1),)}, {"logit_bias": {-1: 1.0}}],
    ids=str,
)
def test_ids_that_do_not_exist_are_refused(changes, generator_of):
    """Row 33: an error, not silence."""
    with pytest.raises(RequestError, match="token id"):
        generator_of("llama").generate(PROMPTS[1], SamplingParameters(**changes))


def test_options_that_are_not_supported_are_refused_by_name(generator_of):
    """Row 33: unknown parameters, and beams that a model's own configuration wants, are refused by name."""
    from types import SimpleNamespace

    from paceline.engine.model_defaults import default_parameters

    with pytest.raises(ConfigError, match="'num_beams'"):
        SamplingParameters().updated({"num_beams": 4})
    with pytest.raises(ConfigError, match="did you mean 'repetition_penalty'"):
        SamplingParameters().updated({"repetition_penalti": 1.3})
    beams = SimpleNamespace(generation_config=SimpleNamespace(num_beams=4))
    with pytest.raises(UnsupportedFeatureError, match="num_beams=4"):
        default_parameters(beams)


SAMPLED = SamplingParameters(max_new_tokens=16, temperature=1.0)


def test_a_seed_gives_its_text_alone_and_in_any_company(generator_of):
    """Row 37: seed 42 twice alone, then among others that arrive and leave."""
    generator = generator_of("llama", max_batch_size=3)
    alone = [generator.generate(PROMPTS[1], replace(SAMPLED, seed=42)).token_ids for _ in range(2)]
    assert alone[0] == alone[1]
    others = [
        replace(SAMPLED, seed=seed, max_new_tokens=3 + seed, temperature=0.5 + seed / 4) for seed in range(5)
    ]
    prompts = [PROMPTS[2], PROMPTS[0], PROMPTS[1], PROMPTS[1], PROMPTS[2]]
    for place in range(6):
        results = generator.generate_batch(
            [*prompts[:place], PROMPTS[1], *prompts[place:]],
            [*others[:place], replace(SAMPLED, seed=42), *others[place:]],
        )
        assert results[place].token_ids == alone[0]


def test_requests_without_a_seed_differ(generator_of):
    """Row 37: ten unseeded requests are not all equal, alone or in one batch; nor are other seeds."""
    generator = generator_of("llama")
    alone = {generator.generate(PROMPTS[1], SAMPLED).token_ids for _ in range(10)}
    batch = {r.token_ids for r in generator.generate_batch([PROMPTS[1]] * 10, SAMPLED)}
    seeded = {generator.generate(PROMPTS[1], replace(SAMPLED, seed=seed)).token_ids for seed in range(10)}
    assert min(len(alone), len(batch), len(seeded)) > 5


def test_positions_of_one_block_do_not_share_a_random_number():
    """Row 37: with a law that never changes, consecutive tokens of an accepted block are independent."""
    everything = [[0, 0], [0, 1], [1, 0], [1, 1]]
    drawn = first_tokens(everything, lambda _: torch.zeros(2), 3, temperature=1.0)
    codes = drawn @ torch.tensor([4, 2, 1])
    assert_follows(codes, torch.full((8,), 1 / 8))


def test_torch_s_global_generator_is_left_alone(generator_of):
    """Row 37: sampled text neither depends on the global state nor moves it."""
    generator = generator_of("llama")
    texts = set()
    for state in (0, 1):
        torch.manual_seed(state)
        before = torch.get_rng_state()
        texts.add(generator.generate(PROMPTS[1], replace(SAMPLED, seed=42)).token_ids)
        generator.generate(PROMPTS[1], SAMPLED)
        assert torch.equal(torch.get_rng_state(), before)
    assert len(texts) == 1
