"""Are two answers different because of rounding, or because of a fault?

In half precision the same model gives slightly different logits when it reads one token or sixty-four at a
time, so two correct decoders part where the two likeliest tokens are practically equal. Where answers first
differ, the reference model is run over the common prefix, and the gap between its likeliest token and the
ones that were chosen is compared with the noise that the reference itself shows between widths 1 and 64. A
larger gap is a fault.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.bench.arms import ArmName
from paceline.bench.records import GroupRecord, TurnRecord
from paceline.bench.rows import answers_of, reference_arm

NOISE_PERCENTILE = 99.9
NOISE_WIDTH = 64
NOISE_SEQUENCES = 4


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an answer leaves the reference's for the first time.

    Attributes:
        suite: of the prompt.
        batch_size: at which it was decoded.
        arm: whose answer.
        reference: arm that it was compared with.
        prompt_id: which prompt.
        turn: which of its messages.
        position: of the first different token in the answer.
        reference_token_id: the reference's token there; None when it had ended.
        token_id: the arm's token there; None when it had ended.
        top2_gap: likeliest minus second likeliest logit of the reference model after the common prefix.
        gap: likeliest logit minus the lower one of the two tokens'; equal to `top2_gap` when they are the
            likeliest two. Infinite when one answer ended where the other went on.
    """

    suite: str
    batch_size: int
    arm: str
    reference: str
    prompt_id: str
    turn: int
    position: int
    reference_token_id: int | None
    token_id: int | None
    top2_gap: float
    gap: float

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def first_difference(token_ids: Seq[int], reference_ids: Seq[int]) -> int | None:
    """Position of the first different token (behind the shorter one when it is a prefix); None when equal."""
    for position, (own, other) in enumerate(zip(token_ids, reference_ids, strict=False)):
        if own != other:
            return position
    shorter, longer = sorted((len(token_ids), len(reference_ids)))
    return None if shorter == longer else shorter


@dataclass(frozen=True, slots=True)
class _Parting:
    """Where two answers to one prompt part: after the same prompt ids and answer, two different tokens."""

    turn: int
    position: int
    prefix_ids: tuple[int, ...]
    reference_token_id: int | None
    token_id: int | None


def find_differences(records: Seq[GroupRecord], arms: Seq[ArmName], model: Any) -> list[Difference]:
    """First difference of every prompt and arm from its reference, in the order of the records.

    Args:
        records: of the whole run.
        arms: of the run.
        model: Hugging Face model that judges the gaps.
    """
    by_arm: dict[tuple[str, int, str], list[GroupRecord]] = {}
    for record in records:
        by_arm.setdefault((record.key.suite, record.key.batch_size, record.key.arm), []).append(record)

    @cache
    def gaps(prefix_ids: tuple[int, ...], first: int | None, second: int | None) -> tuple[float, float]:
        # Arms often part from the reference in the same way: one forward serves them all.
        return logit_gaps(model, prefix_ids, first, second)

    differences: list[Difference] = []
    for (suite, batch_size, label), own in by_arm.items():
        arm = next((a for a in arms if str(a) == label), None)
        reference = None if arm is None else reference_arm(arm, arms)
        expected = answers_of(by_arm.get((suite, batch_size, str(reference)), []))
        for prompt_id, turns in answers_of(own).items():
            parting = _parting(turns, expected.get(prompt_id, []))
            if parting is not None:
                tokens = parting.reference_token_id, parting.token_id
                place = (prompt_id, parting.turn, parting.position)
                found = gaps(parting.prefix_ids, *tokens)
                differences.append(
                    Difference(suite, batch_size, label, str(reference), *place, *tokens, *found)
                )
    return differences


def _parting(turns: Seq[TurnRecord], expected: Seq[TurnRecord]) -> _Parting | None:
    """The first difference between two answers; later turns have another history and are not compared."""
    for turn, wanted in zip(turns, expected, strict=False):
        position = first_difference(turn.token_ids, wanted.token_ids)
        if position is not None:
            return _Parting(
                turn.turn,
                position,
                (*wanted.prompt_ids, *wanted.token_ids[:position]),
                token_at(wanted.token_ids, position),
                token_at(turn.token_ids, position),
            )
    return None


def token_at(token_ids: Seq[int], position: int) -> int | None:
    """The token at a position, None behind the end."""
    return token_ids[position] if position < len(token_ids) else None


def answered_sequences(records: Iterable[GroupRecord]) -> list[list[int]]:
    """Prompts with their answers, in an order that spreads over the run: neighbours resemble each other."""
    found = [[*turn.prompt_ids, *turn.token_ids] for record in records for turn in record.turns]
    step = max(1, len(found) // NOISE_SEQUENCES)
    return [found[i] for i in sorted(range(len(found)), key=lambda i: (i % step, i))]


@torch.inference_mode()
def logit_gaps(
    model: Any, prefix_ids: Seq[int], first: int | None, second: int | None
) -> tuple[float, float]:
    """`(top2_gap, gap)` of Difference, by one forward of the reference model without a cache."""
    ids = torch.tensor([list(prefix_ids)], device=model.device)
    logits: Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1].float()
    top = logits.topk(2).values.tolist()
    if first is None or second is None:
        return top[0] - top[1], float("inf")
    return top[0] - top[1], top[0] - float(torch.minimum(logits[first], logits[second]))


@torch.inference_mode()
def width_noise(model: Any, sequences: Seq[Seq[int]], percentile: float = NOISE_PERCENTILE) -> float | None:
    """Percentile of |difference| between the model's logits at widths 1 and 64, over all vocabulary entries.

    Args:
        model: Hugging Face causal LM.
        sequences: token ids to read; those of 65 tokens or more are used, up to four.
        percentile: of the absolute differences.

    Returns:
        None when no sequence is long enough.
    """
    long_enough = [list(ids) for ids in sequences if len(ids) > NOISE_WIDTH][:NOISE_SEQUENCES]
    if not long_enough:
        return None
    found = [
        (_tail_logits(model, ids, NOISE_WIDTH) - _tail_logits(model, ids, 1)).abs().flatten()
        for ids in long_enough
    ]
    return float(np.percentile(torch.cat(found).numpy(), percentile))


def _tail_logits(model: Any, ids: list[int], width: int) -> Tensor:
    """[64, V] logits of the last 64 tokens, read `width` at a time behind a cached prefix."""
    device = model.device
    output = model(
        input_ids=torch.tensor([ids[:-NOISE_WIDTH]], device=device), use_cache=True, logits_to_keep=1
    )
    # The cache goes back in under the name it came out with; that name differs between releases.
    name = "cache" if "cache" in output else "past_key_values"
    tail = ids[-NOISE_WIDTH:]
    logits = []
    for start in range(0, NOISE_WIDTH, width):
        step = torch.tensor([tail[start : start + width]], device=device)
        output = model(input_ids=step, use_cache=True, **{name: output[name]})
        logits.append(output.logits[0].float().cpu())
    return torch.cat(logits)
