"""Arms: the ways of decoding that a benchmark compares.

An arm is given token ids and returns token ids, so that every arm sees the same prompts, and only what was
emitted counts. All arms of a run share one target, that is, one copy of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from paceline.bench.verifier_specs import VerifierSpec
from paceline.config import AUTO_WIDTH
from paceline.engine.forward_cost import measured_cost
from paceline.engine.generator import Generator
from paceline.engine.node_budget import AdaptiveBudget, NodeBudget, budget_of
from paceline.engine.stats import GenerationStatistics
from paceline.errors import UnsupportedFeatureError
from paceline.registry import drafter_class, split_drafter
from paceline.sampling import SamplingParameters

STRICT = "greedy"
"""Verifier that lossy ones are compared with."""
PLAIN = "none"
"""Drafter of plain decoding."""


@dataclass(frozen=True, slots=True)
class ArmName:
    """What distinguishes an arm.

    Attributes:
        drafter: registered name, or a baseline's.
        verifier: as it was asked for; see `verifier_specs`.
        num_speculative_tokens: most drafted nodes a round or `auto`; None where nothing is drafted by this
            engine.
        head: folder of the head, when one was named.
        repeat: 2 for the strict arm that is measured once more behind the lossy ones.
    """

    drafter: str
    verifier: str = "greedy"
    num_speculative_tokens: int | str | None = None
    head: str | None = None
    repeat: int = 1

    def __str__(self) -> str:
        """Unique within a run, and readable."""
        width = "" if self.num_speculative_tokens is None else f"/{self.num_speculative_tokens}"
        head = "" if self.head is None else f":{self.head}"
        again = "" if self.repeat == 1 else f"#{self.repeat}"
        return f"{self.drafter}{head}/{self.verifier}{width}{again}"


@dataclass(frozen=True, slots=True)
class ArmAnswer:
    """One answer of an arm.

    Attributes:
        token_ids: emitted ids, the end-of-sequence id included.
        text: their text, for the history of a second turn.
        statistics: of the engine; None for baselines, which have no rounds.
        log_prob: of all its tokens under the target; None where it was not asked for.
        is_cut: ended by its length and not by itself; None for baselines, which do not say.
    """

    token_ids: tuple[int, ...]
    text: str
    statistics: GenerationStatistics | None = None
    log_prob: float | None = None
    is_cut: bool | None = None


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
        parameters: of the requests, but for their length; plain greedy decoding without.
        is_scored: whether answers come with their log-probability under the target, which takes time.
    """

    def __init__(
        self,
        name: ArmName,
        generator: Generator,
        parameters: SamplingParameters | None = None,
        *,
        is_scored: bool = False,
    ) -> None:
        self.name = name
        self.generator = generator
        self.parameters = parameters or SamplingParameters()
        self.is_scored = is_scored

    def answer(self, prompts: Seq[Seq[int]], max_new_tokens: int) -> list[ArmAnswer]:
        """Answer prompts of token ids as one batch."""
        return self._answer(
            prompts,
            replace(self.parameters, max_new_tokens=max_new_tokens, logprobs=0 if self.is_scored else None),
        )

    def answer_fixed(self, prompts: Seq[Seq[int]], num_tokens: int) -> list[ArmAnswer]:
        """The same work for all arms: exactly so many tokens, whatever they are."""
        return self._answer(prompts, replace(self.parameters, max_new_tokens=num_tokens, ignore_eos=True))

    def _answer(self, prompts: Seq[Seq[int]], parameters: SamplingParameters) -> list[ArmAnswer]:
        results = self.generator.generate_batch([list(ids) for ids in prompts], parameters)
        return [
            ArmAnswer(
                result.token_ids,
                result.text,
                result.statistics,
                None if result.log_probs is None else sum(entry.log_prob for entry in result.log_probs),
                result.finish_reason == "length",
            )
            for result in results
        ]


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

    Beside a lossy verifier the strict one is measured twice, first and last: how far the two are apart says
    what a difference means. Drafter `none` is verified strictly only, since it leaves nothing to relax.

    Args:
        generator: whose target and tokenizer are shared.
        drafters: registered names; `phrase:FOLDER` names a head of its own.
        verifiers: as `VerifierSpec.read` takes them.
        widths: values of `num_speculative_tokens`; drafter `none` has one arm whatever they are.
        head: folder of the head of trained drafters that do not name one.
        max_batch_size: largest batch that will be asked for.
        temperature: of sampling verifiers.
        seed: of sampling verifiers.
        progress: told in one line what takes time.
    """
    arms: list[Arm] = []
    specs = [VerifierSpec.read(verifier) for verifier in verifiers]
    is_lossy = any(spec.is_lossy for spec in specs)
    # Measured once: every arm that weighs forwards weighs them alike, on a machine that is too busy to keep
    # what it measured as well.
    is_weighed = AUTO_WIDTH in widths and any(drafter != PLAIN for drafter in drafters)
    cost = measured_cost(generator.target, progress=progress) if is_weighed else None

    def budget_for(width: int | str) -> NodeBudget:
        if width == AUTO_WIDTH and cost is not None:
            return AdaptiveBudget(cost, pads=generator.target.pads_rows)
        return budget_of(width, generator.target)

    for text in drafters:
        named = split_drafter(text)
        drafter = named.name
        build = drafter_class(drafter)
        own_head = named.head or (head if drafter not in ("none", "prompt_lookup") else None)
        for width in widths if drafter != "none" else (0,):
            built = build.build(generator.target, own_head, budget_for(width).max_nodes)
            own: list[EngineArm] = []
            for spec in specs:
                if drafter == "none" and spec.is_lossy:
                    continue
                name = ArmName(
                    drafter,
                    spec.text,
                    width if drafter != "none" else None,
                    None if named.head is None else str(named.head),
                )
                repeats = (1, 2) if name.verifier == STRICT and is_lossy and drafter != "none" else (1,)
                for repeat in repeats:
                    # What a budget learns from one arm's rounds is not to help another.
                    decoder = Generator(
                        generator.target,
                        generator.tokenizer,
                        built,
                        eos_token_ids=tuple(generator.eos_token_ids),
                        verifier=spec.name,
                        num_speculative_tokens=budget_for(width),
                        max_batch_size=max_batch_size,
                    )
                    parameters = SamplingParameters(
                        temperature=temperature if spec.name == "sampling" else 0.0,
                        seed=seed,
                        relaxation=spec.relaxation,
                    )
                    own.append(
                        EngineArm(replace(name, repeat=repeat), decoder, parameters, is_scored=is_lossy)
                    )
            arms += sorted(own, key=lambda arm: arm.name.repeat)
    _refuse_repeated(arms)
    return arms


def _refuse_repeated(arms: Seq[Arm]) -> None:
    """Two arms of one name would be mixed up in the records."""
    names = [str(arm.name) for arm in arms]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise UnsupportedFeatureError(f"arms {', '.join(repeated)} are asked for twice: name each once")
