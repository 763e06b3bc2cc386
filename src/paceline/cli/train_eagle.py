"""`paceline train eagle3`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from paceline.cli.bench import numbers
from paceline.cli.console import print_stages
from paceline.cli.option_groups import expand_options
from paceline.cli.training_options import AnswerOptions, PromptOptions, RunOptions


@expand_options
def eagle3(
    out: Annotated[Path, Option(help="Folder of the finished head.")],
    prompts: PromptOptions,
    answers: AnswerOptions,
    run: RunOptions,
    vocabulary: Annotated[
        str,
        Option(
            help="What the head learns to score with: full (the target's output layer), speculative (the "
            "same, and a ranking beside it) or static (a reduced output layer of its own)."
        ),
    ] = "speculative",
    static_entries: Annotated[
        int | None,
        Option(help="Tokens of the static vocabulary; by default a quarter of all, at most 32,000."),
    ] = None,
    static_corpus: Annotated[
        list[str] | None,
        Option(help="Texts whose tokens are counted for it, as for --data; by default the target's answers."),
    ] = None,
    ranking_width: Annotated[
        int | None, Option(help="Width of the ranking; by default an eighth of the hidden size.")
    ] = None,
    feature_layers: Annotated[
        str | None,
        Option(help="Layers whose inputs are fused, separated by commas; by default 2, L / 2 and L - 3."),
    ] = None,
    intermediate_size: Annotated[
        int | None, Option(help="Of the head's MLP; by default the target's, as the next three.")
    ] = None,
    num_heads: Annotated[int | None, Option(help="Attention heads.")] = None,
    num_kv_heads: Annotated[int | None, Option(help="Heads of keys and values.")] = None,
    head_dim: Annotated[int | None, Option(help="Width of a head.")] = None,
    init: Annotated[Path | None, Option(help="Head to go on from; its vocabulary stays as it is.")] = None,
    features: Annotated[
        str, Option(help="online: the target reads the texts in every epoch; cached: once, onto the disk.")
    ] = "online",
    epochs: Annotated[int, Option(help="Passes over the texts.")] = 3,
    learning_rate: Annotated[float, Option("--learning-rate", "--lr", help="Peak.")] = 1e-3,
    batch_tokens: Annotated[int, Option(help="Tokens of a step, padding included.")] = 2048,
    max_len: Annotated[int, Option(help="Most tokens of a text, its prompt included.")] = 1024,
    num_steps: Annotated[int, Option(help="Steps of the training-time test.")] = 7,
    step_decay: Annotated[float, Option(help="What a step counts, to the power of its number.")] = 0.8,
    loss_fraction: Annotated[
        float, Option(help="Share of the positions that the loss is taken at, drawn for every batch.")
    ] = 1.0,
    gradient_norm: Annotated[float, Option(help="At which gradients are clipped.")] = 0.5,
    stop_after: Annotated[
        str, Option(help="Last stage: prompts, answers, fit, vocabulary, evaluation or export.")
    ] = "export",
) -> None:
    """Train an EAGLE-3 head: prompts, the target's own answers, fit, vocabulary, evaluation, head folder."""
    from paceline.training.eagle_options import EagleTrainingOptions
    from paceline.training.eagle_pipeline import EAGLE_PIPELINE
    from paceline.training.pipeline import TrainingRun

    options = EagleTrainingOptions(
        out=out,
        **prompts.given(),
        **answers.given(),
        **run.given(),
        vocabulary=vocabulary,
        static_entries=static_entries,
        static_corpus=tuple(static_corpus or ()),
        ranking_width=ranking_width,
        feature_layers=None if feature_layers is None else tuple(numbers("--feature-layers", feature_layers)),
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        init=init,
        features=features,
        epochs=epochs,
        learning_rate=learning_rate,
        batch_tokens=batch_tokens,
        max_len=max_len,
        num_steps=num_steps,
        step_decay=step_decay,
        loss_fraction=loss_fraction,
        gradient_norm=gradient_norm,
        stop_after=stop_after,
    )
    print_stages(TrainingRun(options, EAGLE_PIPELINE).run())
