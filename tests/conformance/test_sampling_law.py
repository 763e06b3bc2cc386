"""Sampled text follows the target's own law with every drafter, and a seed's text depends on nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from chi_square import chi_square, chi_square_limit
from conftest import PROMPTS
from paceline.drafters.none import NoDrafter
from paceline.drafters.phrase import PhraseDrafter
from paceline.drafters.prompt_lookup import PromptLookupDrafter
from paceline.engine.prefill import FixedPace
from paceline.engine.speculate import SpeculativeEngine
from paceline.sampling import SamplingParameters
from paceline.sequence import Sequence
from paceline.testing import ReplayDrafter
from paceline.tree import DraftTree

NUM_REQUESTS = 2_000
PROMPT = PROMPTS[1]


class LikelyTreeDrafter(ReplayDrafter):
    """Drafts the likeliest tokens of two levels, so that many different paths are accepted."""

    def __init__(self, paths):
        super().__init__({}, 0)
        self.paths = paths

    def _tree(self, sequence):
        return DraftTree.from_paths(sequence.last_token_id, [] if sequence.output_ids else self.paths)


def filtered(logits, parameters):
    """[..., V] the law of a row of logits, written out plainly."""
    scores = logits / parameters.temperature
    if parameters.top_k:
        worst = scores.topk(parameters.top_k).values[..., -1:]
        scores = scores.masked_fill(scores < worst, float("-inf"))
    law = torch.softmax(scores, dim=-1)
    if parameters.top_p < 1:
        ordered, order = law.sort(dim=-1, descending=True)
        outside = ordered.cumsum(dim=-1) - ordered >= parameters.top_p
        law = law.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), 0)
    if parameters.min_p:
        law = law.masked_fill(law < parameters.min_p * law.amax(dim=-1, keepdim=True), 0)
    return law / law.sum(dim=-1, keepdim=True)


@pytest.fixture(scope="module")
def pair_logits(target_of):
    """Logits [V] of the first token and [V, V] of the second one after each first token."""
    model, vocab_size = target_of("llama").model, target_of("llama").vocab_size
    ids = torch.cat([torch.tensor([PROMPT]).expand(vocab_size, -1), torch.arange(vocab_size)[:, None]], dim=1)
    with torch.no_grad():
        logits = model(ids).logits
    return logits[0, -2], logits[:, -1]


PARAMETERS = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 4},
    {"temperature": 1.3, "top_p": 0.25},
    {"temperature": 1.5, "min_p": 0.2},
]


@pytest.mark.parametrize("asked", PARAMETERS, ids=str)
@pytest.mark.parametrize("shape", ["none", "likely tree", "one wrong token"])
def test_pairs_of_tokens_follow_the_law_of_the_model(asked, shape, target_of, pair_logits):
    """Chi-square over the likeliest pairs, all others together, against probabilities computed by hand."""
    parameters = SamplingParameters(max_new_tokens=2, **asked)
    first, second = (filtered(logits, parameters).double() for logits in pair_logits)
    joint = (first[:, None] * second).flatten()
    best, after = first.topk(3).indices.tolist(), second.topk(2).indices
    paths = {
        "none": [],
        "likely tree": [[a, int(b)] for a in best for b in after[a]],
        "one wrong token": [[int(first.argmin())]],
    }[shape]
    engine = SpeculativeEngine(
        target_of("llama"), LikelyTreeDrafter(paths), max_batch_size=200, prefill_chunk=2000
    )
    sequences = [Sequence(list(PROMPT), parameters, frozenset(), 256, seed) for seed in range(NUM_REQUESTS)]
    for sequence in sequences:
        engine.submit(sequence)
    num_accepted = 0
    while engine.has_work:
        num_accepted += sum(len(outcome.result.path) for outcome in engine.round())
    drawn = torch.tensor([sequence.output_ids for sequence in sequences])
    counts = torch.bincount(drawn[:, 0] * 96 + drawn[:, 1], minlength=96 * 96).double()
    assert_follows(counts, joint)
    assert_follows(torch.bincount(drawn[:, 0], minlength=96).double(), first)
    assert (num_accepted > NUM_REQUESTS // 4) == (shape == "likely tree")


def assert_follows(counts, law):
    """Outcomes expected often enough stand alone, the others are one class; impossible ones never occur."""
    assert not counts[law == 0].any()
    alone = law * NUM_REQUESTS >= 10
    observed = torch.cat([counts[alone], counts[~alone].sum()[None]])
    expected = torch.cat([law[alone], law[~alone].sum()[None]]) * NUM_REQUESTS
    keep = expected >= 5
    assert int(keep.sum()) > 2
    assert chi_square(observed[keep], expected[keep]) < chi_square_limit(int(keep.sum()) - 1)


SAMPLED = SamplingParameters(max_new_tokens=20, temperature=0.8, top_p=0.95, seed=11)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3", "qwen2-sliding"])
def test_text_of_a_seed_is_the_same_with_every_drafter_tree_and_company(
    architecture, generator_of, target_of, phrase_head_of
):
    """fp32: drafters, tree shapes, block sizes, batches and prompt chunks leave the text alone."""
    plain = generator_of(architecture, NoDrafter())
    expected = [plain.generate(prompt, SAMPLED) for prompt in PROMPTS]
    recorded = {tuple(p): r.token_ids for p, r in zip(PROMPTS, expected, strict=True)}
    drafters = [
        PromptLookupDrafter(),
        PhraseDrafter.build(target_of(architecture), phrase_head_of(architecture), 16),
        *(ReplayDrafter(recorded, n, decoys=decoys) for n in (1, 6) for decoys in (False, True)),
        ReplayDrafter(recorded, 5, wrong=3, decoys=True),
    ]
    accepted = []
    for drafter in drafters:
        generator = generator_of(architecture, drafter, max_batch_size=2)
        generator.engine.pace = FixedPace(16)
        alone = [generator.generate(prompt, SAMPLED) for prompt in PROMPTS]
        company = generator.generate_batch(
            [*PROMPTS, PROMPTS[0]], [SAMPLED] * 3 + [replace(SAMPLED, seed=5, temperature=2.0)]
        )
        for results in (alone, company[:3]):
            assert [r.token_ids for r in results] == [r.token_ids for r in expected]
            assert [r.text for r in results] == [r.text for r in expected]
        accepted.append(sum(r.statistics.num_accepted_tokens for r in alone))
    # Replayed drafts of the very text are accepted as a whole.
    assert accepted[2:6] == [30, 30, 51, 51]


def test_text_of_a_seed_goes_on_alike_when_its_beginning_becomes_the_prompt(generator_of):
    """Randomness belongs to absolute positions: cutting a text and going on from there changes nothing."""
    generator = generator_of("llama")
    whole = generator.generate(PROMPTS[1], SAMPLED).token_ids
    for cut in (1, 8, 19):
        rest = replace(SAMPLED, max_new_tokens=20 - cut)
        assert generator.generate([*PROMPTS[1], *whole[:cut]], rest).token_ids == whole[cut:]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_samples_only_possible_tokens(dtype, target_of, tokenizer):
    """bf16 and fp16: no NaN, nothing outside the filters, the same text for the same seed and shape."""
    from paceline.engine.generator import Generator

    generator = Generator(target_of("llama", dtype=dtype), tokenizer, ReplayDrafter({}, 0))
    asked = replace(SAMPLED, top_k=3, logprobs=5)
    first, again = (generator.generate_batch(PROMPTS, asked) for _ in range(2))
    for result, repeated in zip(first, again, strict=True):
        assert result.token_ids == repeated.token_ids
        for entry in result.log_probs:
            assert entry.token_id in list(entry.top)[:4]
            assert all(value == value and value <= 0 for value in entry.top.values())
