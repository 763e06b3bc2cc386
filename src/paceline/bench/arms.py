"""Arms: the ways of decoding that a benchmark compares.

An arm is given token ids and returns token ids, so that every arm sees the same prompts, and only what was
emitted counts. All arms of a run share one target, that is, one copy of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from paceline.engine.generator import Generator
from paceline.engine.node_budget import budget_of
from paceline.engine.stats import GenerationStatistics
from paceline.errors import UnsupportedFeatureError
from paceline.registry import drafter_class, verifier_class
from paceline.sampling import SamplingParameters


@dataclass(frozen=True, slots=True)
class ArmName:
    """What distinguishes an arm.

    Attributes:
        drafter: registered name, or a baseline's.
        verifier: registered name.
        num_speculative_tokens: most drafted nodes a round or `auto`; None where nothing is drafted by this
            engine.
        head: folder of the head, when one was named.
    """

    drafter: str
    verifier: str = "greedy"
    num_speculative_tokens: int | str | None = None
    head: str | None = None

    def __str__(self) -> str:
        """Unique within a run, and readable."""
        width = "" if self.num_speculative_tokens is None else f"/{self.num_speculative_tokens}"
        head = "" if self.head is None else f":{self.head}"
        return f"{self.drafter}{head}/{self.verifier}{width}"


@dataclass(frozen=True, slots=True)
class ArmAnswer:
    """One answer of an arm.

    Attributes:
        token_ids: emitted ids, the end-of-sequence id included.
        text: their text, for the history of a second turn.
        statistics: of the engine; None for baselines, which have no rounds.
    """

    token_ids: tuple[int, ...]
    text: str
    statistics: GenerationStatistics | None = None


class Arm(Protocol):
    """One way of decoding."""

    @property
    def name(self) -> ArmName:
        """What distinguishes it."""

    def answer(self, prompts: Seq[Seq[int]], max_new_tokens: int) -> list[ArmAnswer]:
        """Answer prompts of token ids as one batch."""


class EngineArm:
    """Decoding by this engine.

    Args:
        name: for the report.
        generator: on the shared target.
        temperature: of a sampling verifier; greedy ones ignore it.
        seed: of a sampling verifier.
    """

    def __init__(
        self, name: ArmName, generator: Generator, *, temperature: float = 1.0, seed: int = 0
    ) -> None:
        self.name = name
        self.generator = generator
        self.temperature = 0.0 if name.verifier == "greedy" else temperature
        self.seed = seed

    def answer(self, prompts: Seq[Seq[int]], max_new_tokens: int) -> list[ArmAnswer]:
        """Answer prompts of token ids as one batch."""
        parameters = SamplingParameters(
            max_new_tokens=max_new_tokens, temperature=self.temperature, seed=self.seed
        )
        results = self.generator.generate_batch([list(ids) for ids in prompts], parameters)
        return [ArmAnswer(result.token_ids, result.text, result.statistics) for result in results]


def engine_arms(
    generator: Generator,
    drafters: Seq[str],
    verifiers: Seq[str],
    widths: Seq[int | str],
    *,
    head: Path | None = None,
    max_batch_size: int = 1,
    temperature: float = 1.0,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> list[Arm]:
    """An arm for every drafter, verifier and width, all on the generator's target.

    Args:
        generator: whose target and tokenizer are shared.
        drafters: registered names; `phrase:FOLDER` names a head of its own.
        verifiers: registered names.
        widths: values of `num_speculative_tokens`; drafter `none` has one arm whatever they are.
        head: folder of the head of trained drafters that do not name one.
        max_batch_size: largest batch that will be asked for.
        temperature: of sampling verifiers.
        seed: of sampling verifiers.
        progress: told in one line what takes time.
    """
    arms: list[Arm] = []
    for text in drafters:
        drafter, _, folder = text.partition(":")
        build = drafter_class(drafter)
        own_head = Path(folder) if folder else head if drafter not in ("none", "prompt_lookup") else None
        for width in widths if drafter != "none" else (0,):
            built = build.build(
                generator.target, own_head, budget_of(width, generator.target, progress).max_nodes
            )
            for verifier in verifiers:
                verifier_class(verifier)
                name = ArmName(
                    drafter, verifier, width if drafter != "none" else None, str(own_head) if folder else None
                )
                shared = Generator(
                    generator.target,
                    generator.tokenizer,
                    built,
                    eos_token_ids=tuple(generator.eos_token_ids),
                    verifier=verifier,
                    num_speculative_tokens=width,
                    max_batch_size=max_batch_size,
                )
                arms.append(EngineArm(name, shared, temperature=temperature, seed=seed))
    _refuse_repeated(arms)
    return arms


def _refuse_repeated(arms: Seq[Arm]) -> None:
    """Two arms of one name would be mixed up in the records."""
    names = [str(arm.name) for arm in arms]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise UnsupportedFeatureError(f"arms {', '.join(repeated)} are asked for twice: name each once")
