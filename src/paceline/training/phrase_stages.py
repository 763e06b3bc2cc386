"""The stages that make a phrase head out of recorded answers: vocabulary, fit, evaluation, export."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.config import dtype_from_name, dtype_name
from paceline.drafters.phrase import PhraseDrafter
from paceline.errors import CheckpointError, ConfigError
from paceline.heads.checkpoint import LoadedHead, load_head, save_head
from paceline.heads.phrase import INPUTS, PhraseHead, PhraseHeadConfig
from paceline.training.allocator import keep_large_blocks
from paceline.training.context import RunContext, folder_digest, location_digests
from paceline.training.engine_check import check_in_engine, evenly_spaced
from paceline.training.evaluate import HeadEvaluation
from paceline.training.fit import FitOptions, PhraseFit, start_from_frequencies
from paceline.training.loops import loop_start
from paceline.training.phrase_options import PhraseTrainingOptions
from paceline.training.provenance import build_provenance, build_readme
from paceline.training.run_folder import write_json
from paceline.training.samples import Samples, read_samples
from paceline.training.shards import Answer, read_answers
from paceline.vocabularies.phrases import PhraseVocabulary

Context = RunContext[PhraseTrainingOptions]
Reported = Mapping[str, Mapping[str, Any]]
DEFAULT_CHAIN_ENTRIES = 4000
"""Phrases that may follow another, where the options do not say."""


def vocabulary_dependencies(context: Context) -> dict[str, Any]:
    """What the phrases depend on, beside the answers."""
    options = context.options
    # Named only when it is on, so that runs from before this option existed go on.
    loops = options.chosen("drop_loops") if options.drop_loops else {}
    if options.init is not None:
        return {
            "init": folder_digest(options.init, ("model.safetensors", "phrases.json")),
            **options.chosen("held_out"),
            **loops,
        }
    return {**options.chosen("entries", "max_words", "criterion", "held_out"), **loops}


def run_vocabulary(context: Context) -> dict[str, Any]:
    """Mine phrases from the training answers; a head that is gone on from keeps its own."""
    options = context.options
    folder = context.stage_folder("vocabulary")
    if options.init is not None:
        # New phrases would give the head's output rows other meanings.
        vocabulary = load_head(options.init).vocabulary
    else:
        texts = (
            _useful_ids(answer, drop_loops=options.drop_loops)
            for answer in read_answers(context.answers_folder)
            if context.is_training(answer.root_key) and len(answer.output_ids)
        )
        vocabulary = PhraseVocabulary.mine(
            texts,
            context.generator.tokenizer,
            num_entries=options.entries,
            max_words=options.max_words,
            criterion="count" if options.criterion == "count" else "accepted",
            eos_token_ids=context.generator.eos_token_ids,
            progress=context.reporter.say,
        )
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary.save(folder / "phrases.json")
    return {
        "num_entries": len(vocabulary),
        "num_trie_nodes": len(vocabulary.trie),
        "mean_tokens": sum(map(len, vocabulary.token_ids)) / len(vocabulary),
        "folder": folder.name,
    }


def _useful_ids(answer: Answer, *, drop_loops: bool) -> list[int]:
    """Output tokens to learn from."""
    ids: list[int] = answer.output_ids.tolist()
    return ids[: loop_start(ids)] if drop_loops else ids


def fit_dependencies(context: Context) -> dict[str, Any]:
    """What the weights depend on, beside the phrases."""
    names = (
        "dropout", "loss", "epochs", "learning_rate", "weight_decay", "train_batch_size", "patience",
        "ema_decay", "seed",
    )  # fmt: skip
    shape = ("width", "depth", "inputs", "feature_layers", "chain_entries")
    # Named only when it is on, so that runs from before this option existed go on.
    ranking = context.options.chosen("ranking_width") if context.options.ranking_width else {}
    return {**context.options.chosen(*names, *(shape if context.options.init is None else ())), **ranking}


def run_fit(context: Context, reported: Reported) -> dict[str, Any]:
    """Fit the head; its weights are in the stage's folder."""
    vocabulary = _vocabulary(context, reported)
    fit = build_fit(context, vocabulary, context.stage_folder("fit"))
    context.reporter.say(
        f"fit: {len(fit.train.trained):,} samples, {fit.head.num_parameters:,} parameters, "
        f"{len(fit.held_out):,} held-out tokens"
    )
    total = context.options.epochs * fit.steps_per_epoch
    with context.reporter.bar("fit", total, "steps") as on_step:
        result = fit.run(on_step, context.reporter.say)
    evaluation = fit.evaluate()
    _write_evaluation(context.stage_folder("fit"), evaluation)
    return {
        "num_samples": len(fit.train.trained),
        "num_unlabelled": int((fit.train.nodes < 0).sum()),
        "num_censored": int(fit.train.is_censored.sum()),
        "num_empty_answers": fit.train.num_empty,
        "num_parameters": result.head.num_parameters,
        "best_epoch": result.best_epoch,
        "history": [asdict(figures) for figures in result.history],
        "folder": context.stage_folder("fit").name,
        "tokens_per_round": evaluation.tokens_per_round,
        "expected_per_round": evaluation.expected_per_round,
        "calibration": [asdict(part) for part in evaluation.calibration],
        "num_held_out_tokens": evaluation.num_tokens,
    }


def build_fit(context: Context, vocabulary: PhraseVocabulary, folder: Path) -> PhraseFit:
    """Samples, head and optimiser, ready to run."""
    options, target = context.options, context.generator.target
    keep_large_blocks()
    config = _config(context, vocabulary)
    train = _samples(context, vocabulary, "training", config.chain_entries)
    head = _new_head(context, config, train)
    return PhraseFit(
        head,
        scaled_embeddings(target),
        train,
        _samples(context, vocabulary, "held-out", config.chain_entries),
        vocabulary.trie,
        vocabulary.token_ids,
        FitOptions(
            loss=options.loss,
            epochs=options.epochs,
            learning_rate=options.learning_rate,
            weight_decay=options.weight_decay,
            batch_size=options.train_batch_size,
            patience=options.patience,
            ema_decay=options.ema_decay,
            seed=options.seed,
            device=options.device,
        ),
        folder,
    )


def _config(context: Context, vocabulary: PhraseVocabulary) -> PhraseHeadConfig:
    """Shape of the head: as the options say, or that of the head that is gone on from."""
    options = context.options
    if options.init is not None:
        config = load_head(options.init).config
        for name, wanted in options.chosen("inputs", "chain_entries", "ranking_width").items():
            own = getattr(config, name)
            own = list(own) if isinstance(own, tuple) else own
            if wanted is not None and wanted != own:
                raise CheckpointError(
                    f"head {options.init} has {name} {own}, --{name.replace('_', '-')} asks for {wanted}: "
                    "leave the option out, or train without --init"
                )
        return config
    num_chained = DEFAULT_CHAIN_ENTRIES if options.chain_entries is None else options.chain_entries
    return PhraseHeadConfig(
        hidden_size=context.generator.target.hidden_size,
        num_entries=len(vocabulary),
        width=options.width,
        depth=options.depth,
        inputs=INPUTS if options.inputs is None else options.inputs,
        feature_layers=options.feature_layers,
        dropout=options.dropout,
        chain_entries=min(num_chained, len(vocabulary)),
        ranking_width=options.ranking_width or 0,
    )


def _samples(context: Context, vocabulary: PhraseVocabulary, side: str, num_followers: int) -> Samples:
    """Samples of one side of the split."""
    belongs = context.is_training if side == "training" else context.is_held_out
    try:
        return read_samples(
            context.answers_folder,
            vocabulary,
            lambda answer: belongs(answer.root_key),
            drop_loops=context.options.drop_loops and side == "training",
            num_followers=num_followers,
        )
    except ConfigError:
        raise ConfigError(
            f"no {side} answers: give more prompts, a higher --num-tokens, or another --held-out fraction"
        ) from None


def _new_head(context: Context, config: PhraseHeadConfig, train: Samples) -> PhraseHead:
    """A head with fresh weights, or the one that is gone on from."""
    options = context.options
    if options.init is not None:
        loaded = load_head(options.init)
        if loaded.config.feature_layers != options.feature_layers:
            raise CheckpointError(
                f"head {options.init} reads layers {list(loaded.config.feature_layers)}, the answers have "
                f"{list(options.feature_layers)}: give the same --feature-layers"
            )
        return loaded.head
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        head = PhraseHead(config)
    start_from_frequencies(head, train.entries[train.trained])
    return head


def scaled_embeddings(target: Any) -> Tensor:
    """[V, D]: input embeddings of all tokens as the target scales them."""
    with torch.no_grad():
        table: Tensor = target.embedding(torch.arange(target.vocab_size, device=target.device))
    return table.detach().clone()


def evaluation_dependencies(context: Context) -> dict[str, Any]:
    """What the check in the engine depends on, beside the weights."""
    return context.options.chosen("check_prompts", "num_speculative_tokens")


def run_evaluation(context: Context, reported: Reported) -> dict[str, Any]:
    """Answer held-out prompts through the engine with the new head."""
    if not context.options.check_prompts:
        return {"num_prompts": 0}
    answers = [a for a in read_answers(context.answers_folder) if context.is_held_out(a.root_key)]
    figures = check_in_engine(
        context.generator,
        PhraseDrafter(context.generator.target, _loaded_head(context, reported)),
        evenly_spaced(answers, context.options.check_prompts),
        max_new_tokens=context.options.max_new_tokens,
        num_speculative_tokens=context.options.num_speculative_tokens,
    )
    context.reporter.say(
        f"engine: {figures['mean_acceptance_length']:.2f} tokens per round at "
        f"{context.options.num_speculative_tokens} nodes, "
        f"{figures['identical_fraction']:.0%} of the answers identical"
    )
    return figures


def export_dependencies(context: Context) -> dict[str, Any]:
    """What the exported folder depends on, beside the figures."""
    return {**context.options.chosen("export_dtype"), "out": str(context.options.out.absolute())}


def run_export(context: Context, reported: Reported) -> dict[str, Any]:
    """Write the head folder."""
    options = context.options
    loaded = _loaded_head(context, reported)
    provenance = build_provenance(
        options,
        reported,
        target_fingerprint=context.generator.target.fingerprint,
        target_dtype=dtype_name(context.generator.target.dtype),
        data_digests=location_digests(options.data),
    )
    fit = reported["fit"]
    readme = build_readme(provenance, fit["tokens_per_round"], fit["num_held_out_tokens"])
    save_head(
        options.out,
        loaded.head,
        loaded.vocabulary,
        provenance,
        readme,
        dtype=dtype_from_name(options.export_dtype),
    )
    context.reporter.say(f"head written to {options.out}")
    return {"out": options.out.name}


def _vocabulary(context: Context, reported: Reported) -> PhraseVocabulary:
    """The phrases of this run."""
    return PhraseVocabulary.load(context.folder.root / reported["vocabulary"]["folder"] / "phrases.json")


def _loaded_head(context: Context, reported: Reported) -> LoadedHead:
    """The fitted head, as if loaded from its folder."""
    from safetensors.torch import load_file

    vocabulary = _vocabulary(context, reported)
    tensors = load_file(context.folder.root / reported["fit"]["folder"] / "best.safetensors")
    config = _config(context, vocabulary)
    head = PhraseHead(config)
    head.load_state_dict(tensors)
    provenance = {"target_fingerprint": context.generator.target.fingerprint}
    return LoadedHead(head.eval(), vocabulary, config, provenance)


def _write_evaluation(folder: Path, evaluation: HeadEvaluation) -> None:
    """Keep the offline figures beside the weights."""
    write_json(folder / "evaluation.json", asdict(evaluation))
