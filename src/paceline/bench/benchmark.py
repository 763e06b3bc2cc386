"""A whole benchmark from its options: load once, build the arms, run, report."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.bench.arms import STRICT, Arm, ArmName, engine_arms
from paceline.bench.baselines import baseline_arms
from paceline.bench.lossy_rows import lossy_rows
from paceline.bench.metadata import machine, run_metadata
from paceline.bench.near_ties import answered_sequences, find_differences, width_noise
from paceline.bench.peers.base import PeerArm
from paceline.bench.peers.registry import check_peers, peer_arms
from paceline.bench.records import FIXED, NATURAL, Journal
from paceline.bench.report import BenchmarkReport
from paceline.bench.roofline import roofline
from paceline.bench.rows import is_lossy, result_rows
from paceline.bench.runner import BenchmarkRunner, Progress
from paceline.bench.suites import Suite, load_suite
from paceline.bench.tasks import Grader, build_graders
from paceline.bench.verifier_specs import VerifierSpec
from paceline.config import AUTO_WIDTH, dtype_name, read_width
from paceline.engine.generator import Generator
from paceline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BenchmarkOptions:
    """What `paceline bench` was asked for.

    Attributes:
        suites: names.
        data_folder: where suites that are not built in lie.
        limit: most prompts per suite.
        max_new_tokens: most tokens of an answer.
        drafters: registered names; `phrase:FOLDER` for a head of its own.
        verifiers: as `VerifierSpec.read` takes them. With lossy ones among them everything is done twice:
            answers that end by themselves, and a fixed number of tokens.
        baselines: keys of `baselines.BASELINES`; may be none.
        peers: of `peers.registry.PEERS`; may be none.
        widths: values of `num_speculative_tokens`.
        batch_sizes: prompts decoded at once.
        head: folder of the head.
        temperature: of sampling verifiers.
        seed: of sampling and of the intervals.
        runs_code: whether programs that the model writes may be run, to see whether they pass their tests.
    """

    suites: tuple[str, ...] = ("builtin",)
    data_folder: Path | None = None
    limit: int | None = None
    max_new_tokens: int = 128
    drafters: tuple[str, ...] = ("none", "prompt_lookup", "phrase")
    verifiers: tuple[str, ...] = ("greedy",)
    baselines: tuple[str, ...] = ("hf_generate",)
    peers: tuple[str, ...] = ()
    widths: tuple[int | str, ...] = (AUTO_WIDTH,)
    batch_sizes: tuple[int, ...] = (1,)
    head: Path | None = None
    temperature: float = 1.0
    seed: int = 0
    runs_code: bool = False

    def __post_init__(self) -> None:
        """Refuse what could not be measured."""
        for name, values in (
            ("suites", self.suites),
            ("widths", self.widths),
            ("batch sizes", self.batch_sizes),
        ):
            if not values:
                raise ConfigError(f"no {name} given: name at least one")
            if len(set(values)) != len(values):
                raise ConfigError(f"{name} {', '.join(map(str, values))}: name each once")
        if not self.drafters and not self.baselines and not self.peers:
            raise ConfigError(
                "neither drafters nor baselines nor peers are given: there is nothing to measure"
            )
        for width in self.widths:
            read_width(width)
        if self.max_new_tokens < 1 or min(self.batch_sizes) < 1:
            raise ConfigError(
                f"max_new_tokens {self.max_new_tokens}, batch sizes {self.batch_sizes}: both start at 1"
            )
        check_peers(self.peers, max(self.batch_sizes))
        if self.is_lossy and not any(VerifierSpec.read(text).name == STRICT for text in self.verifiers):
            raise ConfigError(
                f"verifiers {', '.join(self.verifiers)}: lossy ones are compared with {STRICT!r}, name it too"
            )
        if self.is_lossy and not set(self.drafters) - {"none"}:
            raise ConfigError(
                f"verifiers {', '.join(self.verifiers)} and drafters {', '.join(self.drafters) or 'none'}: "
                "lossy ones need a drafter that drafts, such as 'phrase'"
            )

    @property
    def is_lossy(self) -> bool:
        """Whether a lossy verifier takes part."""
        return any(VerifierSpec.read(text).is_lossy for text in self.verifiers)

    @property
    def works(self) -> tuple[str, ...]:
        """What is done: see `records.RecordKey`."""
        return (NATURAL, FIXED) if self.is_lossy else (NATURAL,)

    def load_suites(self) -> list[Suite]:
        """The prompts."""
        return [load_suite(name, self.data_folder, self.limit) for name in self.suites]

    def build_arms(
        self, generator: Generator, peer_progress: Callable[[str], None] | None = None
    ) -> list[Arm]:
        """All arms, baselines first, then peers."""
        arms = baseline_arms(generator, self.baselines)
        arms += peer_arms(generator, self.peers, peer_progress)
        return arms + engine_arms(
            generator,
            self.drafters,
            self.verifiers,
            self.widths,
            head=self.head,
            max_batch_size=max(self.batch_sizes),
            temperature=self.temperature,
            seed=self.seed,
        )

    def judged_arms(self, arms: list[Arm]) -> list[ArmName]:
        """Names of the arms whose differences must be explained.

        A peer's arithmetic is its own, and a lossy verifier differs on purpose.
        """
        return [arm.name for arm in arms if arm.name.drafter not in self.peers and not is_lossy(arm.name)]

    def settings(
        self, target: str, generator: Generator, suites: list[Suite], arms: list[Arm]
    ) -> dict[str, Any]:
        """What two runs must share for their records to meet."""
        described = machine()
        peers: list[PeerArm] = [arm for arm in arms if arm.name.drafter in self.peers]  # type: ignore[misc]
        return {
            "target": target,
            "fingerprint": generator.target.fingerprint,
            "dtype": dtype_name(generator.target.dtype),
            "device": str(generator.target.device),
            "execution": getattr(generator.target, "execution", "eager"),
            "cpu": described["cpu"],
            "threads": described["threads"],
            "max_new_tokens": self.max_new_tokens,
            "seed": self.seed,
            "temperature": self.temperature if "sampling" in self.verifiers else 0.0,
            "batch_sizes": list(self.batch_sizes),
            "suites": {suite.name: suite.digest for suite in suites},
            "arms": [str(arm.name) for arm in arms],
            "head": None if self.head is None else str(self.head),
            # Absent without peers, so that runs started before there were any can go on.
            **({"works": list(self.works)} if self.is_lossy else {}),
            **({"peers": {str(arm.name): dict(arm.description) for arm in peers}} if peers else {}),
        }


def run_benchmark(
    options: BenchmarkOptions,
    generator: Generator,
    *,
    target: str,
    out: Path,
    command: str = "",
    with_roofline: bool = False,
    on_progress: Callable[[Progress], None] = lambda _: None,
    notice: Callable[[str], None] | None = None,
) -> BenchmarkReport:
    """Measure, or go on measuring, and write the report into `out`.

    Args:
        options: what to measure.
        generator: holds the target that all arms share.
        target: how the target was named.
        out: folder of the records and the report.
        command: noted in the report.
        with_roofline: hold forwards against the floor that memory sets.
        on_progress: called before every measurement.
        notice: told in one line what takes time before the first of them.
    """
    suites = options.load_suites()

    def decode(token_ids: Seq[int]) -> str:
        return str(generator.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    graders: dict[str, Grader] = {}
    if options.is_lossy:
        graders = build_graders(suites, options.data_folder, decode, runs_code=options.runs_code)
    arms = options.build_arms(generator, notice)
    settings = options.settings(target, generator, suites, arms)
    journal = Journal(out, settings)
    runner = BenchmarkRunner(
        generator,
        arms,
        suites,
        journal,
        max_new_tokens=options.max_new_tokens,
        batch_sizes=options.batch_sizes,
        works=options.works,
    )
    runner.run(on_progress)
    names = [arm.name for arm in arms]
    metadata = run_metadata(command, settings)
    metadata["prompt_ids"] = {suite.name: [prompt.prompt_id for prompt in suite.prompts] for suite in suites}
    records = list(journal)
    lossy = lossy_rows(records, names, options.seed, graders)
    model = getattr(generator.target, "model", None)
    judged = options.judged_arms(arms)
    natural = [record for record in records if record.key.work == NATURAL]
    differences = [] if model is None else find_differences(natural, judged, model)
    noise = width_noise(model, answered_sequences(records)) if differences else None
    floor = roofline(records, names, generator.target) if with_roofline else None
    rows = result_rows(records, names, options.seed)
    report = BenchmarkReport(metadata, rows, differences, noise, floor, lossy)
    report.write(out)
    return report
