"""`paceline train phrase`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from paceline.cli.bench import names, numbers
from paceline.cli.console import print_stages
from paceline.cli.option_groups import expand_options
from paceline.cli.training_options import AnswerOptions, PromptOptions, RunOptions


@expand_options
def phrase(
    out: Annotated[Path, Option(help="Folder of the finished head.")],
    prompts: PromptOptions,
    answers: AnswerOptions,
    run: RunOptions,
    feature_layers: Annotated[
        str, Option(help="Layers whose inputs the head reads besides the final state, separated by commas.")
    ] = "",
    inputs: Annotated[
        str | None,
        Option(help="Vectors that the head reads: hidden, newest_token_embedding; by default both."),
    ] = None,
    entries: Annotated[int, Option(help="Phrases.")] = 8000,
    max_words: Annotated[int, Option(help="Most words of a phrase, 1 to 5.")] = 3,
    criterion: Annotated[str, Option(help="How phrases are chosen: accepted or count.")] = "accepted",
    init: Annotated[Path | None, Option(help="Head to go on from; its phrases stay as they are.")] = None,
    width: Annotated[int, Option(help="Columns of the head's output layer.")] = 256,
    depth: Annotated[int, Option(help="Layers before it.")] = 2,
    chain_entries: Annotated[
        int | None,
        Option(help="Phrases that may follow another in a draft; by default 4,000; 0: one phrase at a time."),
    ] = None,
    ranking_width: Annotated[
        int | None,
        Option(
            help="Width of a ranking that chooses 2,048 phrases to be scored: for vocabularies of 50,000 and "
            "more; by default all are scored."
        ),
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
    stop_after: Annotated[
        str, Option(help="Last stage: prompts, answers, vocabulary, fit, evaluation or export.")
    ] = "export",
) -> None:
    """Train a phrase head: prompts, the target's own answers, vocabulary, fit, evaluation, head folder."""
    from paceline.training.phrase_options import PhraseTrainingOptions
    from paceline.training.phrase_pipeline import PHRASE_PIPELINE
    from paceline.training.pipeline import TrainingRun

    options = PhraseTrainingOptions(
        out=out,
        **prompts.given(),
        **answers.given(),
        **run.given(),
        feature_layers=tuple(numbers("--feature-layers", feature_layers)),
        inputs=None if inputs is None else tuple(names(inputs)),
        entries=entries,
        max_words=max_words,
        criterion=criterion,
        init=init,
        width=width,
        depth=depth,
        chain_entries=chain_entries,
        ranking_width=ranking_width,
        dropout=dropout,
        loss=loss,
        epochs=epochs,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        train_batch_size=train_batch_size,
        patience=patience,
        ema_decay=ema_decay,
        stop_after=stop_after,
    )
    print_stages(TrainingRun(options, PHRASE_PIPELINE).run())
