"""`paceline train`: train a draft head for a frozen target."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from paceline.cli.console import output

train_app = typer.Typer(
    help="Train a draft head for a frozen target.", no_args_is_help=True, add_completion=False
)


@train_app.callback()
def train() -> None:
    """Train a draft head for a frozen target."""


@train_app.command()
def phrase(
    out: Annotated[Path, Option(help="Folder of the finished head.")],
    target: Annotated[str, Option(help="Alias, folder, GGUF file or Hub id.")] = "smollm2",
    data: Annotated[
        list[str] | None,
        Option(help="Prompts: a .jsonl file, a folder of them, or a Hub name; may be repeated."),
    ] = None,
    exclude: Annotated[
        list[str] | None, Option(help="Prompts that must not be trained on (benchmarks), as for --data.")
    ] = None,
    work: Annotated[
        Path | None, Option(help="Run folder; by default OUT.work. The same command resumes.")
    ] = None,
    synthesise: Annotated[
        int | None,
        Option(help="Prompts that the target writes itself; by default 4,000 without --data, else none."),
    ] = None,
    max_per_source: Annotated[int | None, Option(help="Most prompts of one data file.")] = None,
    held_out: Annotated[float, Option(help="Fraction of conversations kept for evaluation.")] = 0.02,
    num_tokens: Annotated[int, Option(help="Tokens of answers to generate.")] = 1_000_000,
    max_new_tokens: Annotated[int, Option(help="Most tokens of an answer.")] = 320,
    temperature: Annotated[float, Option(help="Of the answers; 0 is greedy.")] = 0.0,
    follow_ups: Annotated[
        float, Option(help="Fraction of synthesised conversations with a second turn.")
    ] = 0.3,
    feature_layers: Annotated[
        str, Option(help="Layers whose inputs the head reads besides the final state, separated by commas.")
    ] = "",
    inputs: Annotated[
        str | None,
        Option(help="Vectors that the head reads: hidden, newest_token_embedding; by default both."),
    ] = None,
    drafter: Annotated[str, Option(help="Drafter used while generating.")] = "none",
    head: Annotated[Path | None, Option(help="Head of that drafter.")] = None,
    workers: Annotated[int, Option(help="Processes that generate side by side; on a CPU, one per core.")] = 1,
    batch_size: Annotated[int, Option(help="Answers generated at once by each.")] = 64,
    max_disk_gb: Annotated[float | None, Option(help="Limit for the recorded states.")] = None,
    entries: Annotated[int, Option(help="Phrases.")] = 8000,
    max_words: Annotated[int, Option(help="Most words of a phrase, 1 to 5.")] = 3,
    criterion: Annotated[str, Option(help="How phrases are chosen: accepted or count.")] = "accepted",
    drop_loops: Annotated[
        bool, Option(help="Train on answers only up to where they start to go round in circles.")
    ] = False,
    init: Annotated[Path | None, Option(help="Head to go on from; its phrases stay as they are.")] = None,
    width: Annotated[int, Option(help="Columns of the head's output layer.")] = 256,
    depth: Annotated[int, Option(help="Layers before it.")] = 2,
    chain_entries: Annotated[
        int | None,
        Option(help="Phrases that may follow another in a draft; by default 4,000; 0: one phrase at a time."),
    ] = None,
    dropout: Annotated[float, Option(help="In the head, while training.")] = 0.1,
    loss: Annotated[str, Option(help="longest, mass or mean_mass.")] = "longest",
    epochs: Annotated[int, Option(help="Most passes over the data.")] = 12,
    learning_rate: Annotated[float, Option("--learning-rate", "--lr", help="Peak.")] = 2e-3,
    weight_decay: Annotated[float, Option(help="Of AdamW.")] = 0.05,
    train_batch_size: Annotated[int, Option(help="Samples per step.")] = 2048,
    patience: Annotated[
        int, Option(help="Epochs without improvement on held-out prompts before stopping.")
    ] = 2,
    ema_decay: Annotated[float, Option(help="Of averaged weights; 0 takes the last ones.")] = 0.0,
    check_prompts: Annotated[
        int, Option(help="Held-out prompts answered through the engine at the end.")
    ] = 20,
    num_speculative_tokens: Annotated[int, Option(help="Drafted nodes in that check.")] = 32,
    export_dtype: Annotated[str, Option(help="Of the stored weights: fp32, bf16 or fp16.")] = "bf16",
    seed: Annotated[int, Option(help="Of everything random.")] = 0,
    dtype: Annotated[str, Option(help="Of the target: auto, fp32, bf16 or fp16.")] = "bf16",
    device: Annotated[str, Option(help="auto, cpu, cuda or mps.")] = "auto",
    trust_remote_code: Annotated[bool, Option(help="Allow code from the target's repository.")] = False,
    stop_after: Annotated[
        str, Option(help="Last stage: prompts, answers, vocabulary, fit, evaluation or export.")
    ] = "export",
) -> None:
    """Train a phrase head: prompts, the target's own answers, vocabulary, fit, evaluation, head folder."""
    given = dict(locals())
    from paceline.cli.bench import names, numbers
    from paceline.training.options import TrainingOptions
    from paceline.training.pipeline import TrainingRun

    given["data"], given["exclude"] = tuple(data or ()), tuple(exclude or ())
    given["inputs"] = None if inputs is None else tuple(names(inputs))
    given["feature_layers"] = tuple(numbers("--feature-layers", feature_layers))
    print_report(TrainingRun(TrainingOptions(**given)).run())


def print_report(reported: dict[str, dict[str, Any]]) -> None:
    """What each stage reported, for a person."""
    console = output()
    for stage, figures in reported.items():
        console.print(f"{stage}:")
        for name, value in figures.items():
            console.print(f"  {name}: {value:,}" if isinstance(value, int) else f"  {name}: {value}")
