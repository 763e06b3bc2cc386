"""What limits of lossy verification bring and cost, found by decoding calibration prompts under them.

The regret at strict rejections says what a first relaxed token would cost; what follows it is another text,
which only decoding shows. Every trial answers the same prompts, and is compared with strict decoding on the
same draws of prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from typing import Any

from paceline.bench.intervals import Bootstrap, Interval
from paceline.engine.generator import Generator
from paceline.relaxation import Relaxation
from paceline.sampling import SamplingParameters

STRICT = Relaxation(risk_budget=0.0)


@dataclass(frozen=True, slots=True)
class Trial:
    """Figures of one set of limits over all prompts.

    Attributes:
        limits: what was tried.
        accepted_per_round: accepted draft tokens a round, the target's own not counted.
        gain: those over strict decoding's; None where nothing was accepted.
        regret_per_token: in logits.
        log_prob_change: mean log-probability of an output token under the target, less strict decoding's.
    """

    limits: Relaxation
    accepted_per_round: float
    gain: Interval | None
    regret_per_token: float
    log_prob_change: Interval | None

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Answer:
    num_rounds: int
    num_accepted: int
    num_tokens: int
    regret: float
    log_prob: float


def try_limits(
    generator: Generator,
    prompts: Seq[Seq[int]],
    candidates: Seq[Relaxation],
    *,
    max_new_tokens: int,
    seed: int = 0,
    on_answer: Callable[[int], None] = lambda _: None,
) -> list[Trial]:
    """Answer every prompt strictly and under each of the candidates.

    Args:
        generator: with the drafter in question and verifier `budgeted`.
        prompts: token ids.
        candidates: limits to try.
        max_new_tokens: most tokens of an answer.
        seed: of the draws behind the intervals.
        on_answer: told the number of finished answers, `len(prompts) * (len(candidates) + 1)` in the end.

    Returns:
        One trial a candidate, in order.
    """
    answers: list[list[_Answer]] = [[] for _ in range(len(candidates) + 1)]
    num_done = 0
    for prompt in prompts:
        for found, limits in zip(answers, (STRICT, *candidates), strict=True):
            found.append(_answer(generator, prompt, limits, max_new_tokens))
            num_done += 1
            on_answer(num_done)
    draws = Bootstrap(len(prompts), seed)
    strict = answers[0]
    return [
        _trial(limits, found, strict, draws) for limits, found in zip(candidates, answers[1:], strict=True)
    ]


def best_within(trials: Seq[Trial], loss_per_token: float) -> Trial | None:
    """The trial that accepts most, of those that lose at most so much log-probability a token; None without.

    Judged by the lower end of the interval: a trial on few prompts has to show that it is harmless.
    """
    fine = [t for t in trials if t.log_prob_change is not None and t.log_prob_change.low >= -loss_per_token]
    return max(fine, key=lambda trial: trial.accepted_per_round, default=None)


def _answer(generator: Generator, prompt: Seq[int], limits: Relaxation, max_new_tokens: int) -> _Answer:
    """Decode one prompt."""
    asked = SamplingParameters(max_new_tokens=max_new_tokens, relaxation=limits, logprobs=0)
    sequence = generator.open(list(prompt), asked).sequence
    num_rounds = num_accepted = 0
    while not sequence.is_finished:
        for outcome in generator.engine.round():
            if outcome.tree.num_draft_tokens:
                num_rounds += 1
                num_accepted += len(outcome.result.accepted_ids)
    log_prob = sum(entry.log_prob for entry in sequence.log_probs)
    return _Answer(num_rounds, num_accepted, len(sequence.output_ids), sequence.regret_spent, log_prob)


def _trial(limits: Relaxation, found: Seq[_Answer], strict: Seq[_Answer], draws: Bootstrap) -> Trial:
    """Compare with strict decoding."""
    accepted, rounds = [a.num_accepted for a in found], [a.num_rounds for a in found]
    tokens = [a.num_tokens for a in found]
    return Trial(
        limits,
        sum(accepted) / max(sum(rounds), 1),
        draws.speed_up(accepted, rounds, [a.num_accepted for a in strict], [a.num_rounds for a in strict]),
        sum(a.regret for a in found) / max(sum(tokens), 1),
        draws.difference(
            [a.log_prob for a in found],
            tokens,
            [a.log_prob for a in strict],
            [a.num_tokens for a in strict],
        ),
    )
