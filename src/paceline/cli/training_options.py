"""Options that all `paceline train` commands share: prompts, answers, and the run itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Option

PROMPTS_PANEL = "Prompts"
ANSWERS_PANEL = "Answers"
RUN_PANEL = "Run"


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """What the target is asked."""

    data: Annotated[
        list[str] | None,
        Option(
            help="Prompts: a .jsonl file, a folder of them, or a Hub name; may be repeated.",
            rich_help_panel=PROMPTS_PANEL,
        ),
    ] = None
    exclude: Annotated[
        list[str] | None,
        Option(
            help="Prompts that must not be trained on (benchmarks), as for --data.",
            rich_help_panel=PROMPTS_PANEL,
        ),
    ] = None
    synthesise: Annotated[
        int | None,
        Option(
            help="Prompts that the target writes itself; by default 4,000 without --data, else none.",
            rich_help_panel=PROMPTS_PANEL,
        ),
    ] = None
    follow_ups: Annotated[
        float,
        Option(
            help="Fraction of synthesised conversations with a second turn.", rich_help_panel=PROMPTS_PANEL
        ),
    ] = 0.3
    max_per_source: Annotated[
        int | None, Option(help="Most prompts of one data file.", rich_help_panel=PROMPTS_PANEL)
    ] = None
    held_out: Annotated[
        float,
        Option(help="Fraction of conversations kept for evaluation.", rich_help_panel=PROMPTS_PANEL),
    ] = 0.02

    def given(self) -> dict[str, Any]:
        """As `TrainingOptions` takes them."""
        return {**asdict(self), "data": tuple(self.data or ()), "exclude": tuple(self.exclude or ())}


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How the target answers."""

    num_tokens: Annotated[
        int, Option(help="Tokens of answers to generate.", rich_help_panel=ANSWERS_PANEL)
    ] = 1_000_000
    max_new_tokens: Annotated[
        int, Option(help="Most tokens of an answer.", rich_help_panel=ANSWERS_PANEL)
    ] = 320
    temperature: Annotated[
        float, Option(help="Of the answers; 0 is greedy.", rich_help_panel=ANSWERS_PANEL)
    ] = 0.0
    drafter: Annotated[str, Option(help="Drafter used while generating.", rich_help_panel=ANSWERS_PANEL)] = (
        "none"
    )
    head: Annotated[Path | None, Option(help="Head of that drafter.", rich_help_panel=ANSWERS_PANEL)] = None
    workers: Annotated[
        int,
        Option(
            help="Processes that generate side by side; on a CPU, one per core.",
            rich_help_panel=ANSWERS_PANEL,
        ),
    ] = 1
    batch_size: Annotated[
        int, Option(help="Answers generated at once by each.", rich_help_panel=ANSWERS_PANEL)
    ] = 64
    max_disk_gb: Annotated[
        float | None, Option(help="Limit for the recorded states.", rich_help_panel=ANSWERS_PANEL)
    ] = None
    drop_loops: Annotated[
        bool,
        Option(
            help="Train on answers only up to where they start to go round in circles.",
            rich_help_panel=ANSWERS_PANEL,
        ),
    ] = False

    def given(self) -> dict[str, Any]:
        """As `TrainingOptions` takes them."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The target, the run folder, and what happens at the end."""

    target: Annotated[str, Option(help="Alias, folder, GGUF file or Hub id.", rich_help_panel=RUN_PANEL)] = (
        "smollm2"
    )
    work: Annotated[
        Path | None,
        Option(help="Run folder; by default OUT.work. The same command resumes.", rich_help_panel=RUN_PANEL),
    ] = None
    check_prompts: Annotated[
        int,
        Option(help="Held-out prompts answered through the engine at the end.", rich_help_panel=RUN_PANEL),
    ] = 20
    num_speculative_tokens: Annotated[
        int, Option(help="Drafted nodes in that check.", rich_help_panel=RUN_PANEL)
    ] = 32
    export_dtype: Annotated[
        str, Option(help="Of the stored weights: fp32, bf16 or fp16.", rich_help_panel=RUN_PANEL)
    ] = "bf16"
    seed: Annotated[int, Option(help="Of everything random.", rich_help_panel=RUN_PANEL)] = 0
    dtype: Annotated[
        str, Option(help="Of the target: auto, fp32, bf16 or fp16.", rich_help_panel=RUN_PANEL)
    ] = "bf16"
    device: Annotated[str, Option(help="auto, cpu, cuda or mps.", rich_help_panel=RUN_PANEL)] = "auto"
    trust_remote_code: Annotated[
        bool, Option(help="Allow code from the target's repository.", rich_help_panel=RUN_PANEL)
    ] = False

    def given(self) -> dict[str, Any]:
        """As `TrainingOptions` takes them."""
        return asdict(self)
