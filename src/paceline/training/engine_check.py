"""A new head at work: held-out prompts answered through the engine, compared with the recorded answers."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from paceline.drafters.base import Drafter
from paceline.engine.speculate import SpeculativeEngine
from paceline.sampling import SamplingParameters
from paceline.sequence import Sequence
from paceline.training.shards import Answer


def evenly_spaced(answers: Seq[Answer], count: int) -> list[Answer]:
    """`count` of the answers at even distances, so that every source has its share."""
    step = max(1, len(answers) // max(1, count))
    return list(answers[::step][:count])


def check_in_engine(
    generator: Any,
    drafter: Drafter,
    answers: Seq[Answer],
    *,
    max_new_tokens: int,
    num_speculative_tokens: int,
) -> dict[str, Any]:
    """Answer the prompts of recorded answers one by one, greedily.

    Args:
        generator: the loaded target.
        drafter: with the new head.
        answers: recorded ones.
        max_new_tokens: most tokens of each.
        num_speculative_tokens: drafted nodes per round.

    Returns:
        `num_prompts`, `num_tokens`, `num_rounds`, `mean_acceptance_length` (the target's own token included),
        `identical_fraction` (below 1 only where near-ties of low-precision arithmetic fall differently), and
        `by_source`: acceptance length per source of prompts.
    """
    target = generator.target
    engine = SpeculativeEngine(
        target,
        drafter,
        num_speculative_tokens=num_speculative_tokens,
        max_batch_size=1,
    )
    num_identical = 0
    tokens: dict[str, int] = {}
    rounds: dict[str, int] = {}
    for answer in answers:
        sequence = Sequence(
            answer.prompt_ids.tolist(),
            SamplingParameters(max_new_tokens=max_new_tokens),
            generator.eos_token_ids,
            target.context_len,
            seed=0,
        )
        engine.submit(sequence)
        num_rounds = 0
        while engine.has_work:
            num_rounds += len(engine.round())
        tokens[answer.source] = tokens.get(answer.source, 0) + len(sequence.output_ids)
        rounds[answer.source] = rounds.get(answer.source, 0) + num_rounds
        num_identical += sequence.output_ids == answer.output_ids.tolist()
    num_tokens, num_rounds = sum(tokens.values()), sum(rounds.values())
    return {
        "num_prompts": len(answers),
        "num_tokens": num_tokens,
        "num_rounds": num_rounds,
        "num_speculative_tokens": num_speculative_tokens,
        "mean_acceptance_length": num_tokens / max(1, num_rounds),
        "identical_fraction": num_identical / max(1, len(answers)),
        "by_source": {source: tokens[source] / rounds[source] for source in sorted(tokens)},
    }
