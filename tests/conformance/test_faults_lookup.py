"""Public faults, group G: prompt lookup with nothing to look up."""

from __future__ import annotations

import pytest

from conftest import PROMPTS
from paceline.drafters.prompt_lookup import PromptLookupDrafter
from paceline.engine.generator import Generator
from paceline.errors import RequestError
from paceline.sampling import SamplingParameters

NUM_NEW = 24
PARAMETERS = SamplingParameters(max_new_tokens=NUM_NEW)


@pytest.mark.parametrize("ngram", [1, 3])
@pytest.mark.parametrize("prompt", [[7], [7, 8], [7, 8, 9], [7, 7]], ids=str)
def test_prompts_shorter_than_an_n_gram_are_decoded_plainly(ngram, prompt, generator_of, oracle_of):
    """Row 49: no error, no proposal, the oracle's text."""
    drafter = PromptLookupDrafter(min_ngram_size=ngram, max_ngram_size=3)
    result = generator_of("llama", drafter).generate(prompt, PARAMETERS)
    assert list(result.token_ids) == oracle_of("llama", tuple(prompt), NUM_NEW)


@pytest.mark.parametrize("raw", [False, True])
def test_an_empty_prompt_is_an_error_that_says_so(raw, generator_of, tokenizer, target_of):
    """Row 49: zero ids (this tokenizer adds no start token): a documented error, not a failing reshape."""
    generator = generator_of("llama", PromptLookupDrafter())
    with pytest.raises(RequestError, match="the prompt has 0 tokens"):
        generator.generate("", PARAMETERS, raw=True)
    with pytest.raises(RequestError, match="the prompt has 0 tokens"):
        generator.generate([], PARAMETERS, raw=raw)
    # Through the chat template the same text is a turn without words, which is fine.
    assert generator.generate("", PARAMETERS).prompt_len > 0


def test_rows_without_a_match_run_beside_rows_with_one(generator_of, oracle_of):
    """Row 49: one row has a match, one has none, one matches only itself at its end."""
    repeated = [*PROMPTS[1], *PROMPTS[1], *PROMPTS[1][:3]]
    prompts = [repeated, [7], [11, 12, 13, 14]]
    drafter = PromptLookupDrafter(min_ngram_size=2)
    generator = generator_of("llama", drafter)
    first = drafter_trees(generator, prompts)
    assert [tree.num_draft_tokens > 0 for tree in first] == [True, False, False]
    results = generator.generate_batch(prompts, PARAMETERS)
    for prompt, result in zip(prompts, results, strict=True):
        assert list(result.token_ids) == oracle_of("llama", tuple(prompt), NUM_NEW)


def drafter_trees(generator: Generator, prompts):
    """What the first round drafts for each prompt."""
    answers = [generator.open(list(prompt), PARAMETERS) for prompt in prompts]
    outcomes = {outcome.sequence: outcome for outcome in generator.engine.round()}
    trees = [outcomes[answer.sequence].tree for answer in answers]
    for answer in answers:
        generator.engine.release(answer.sequence)
    return trees
