"""The stages that make an EAGLE-3 head out of recorded answers: fit, vocabulary, evaluation, export."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.config import dtype_from_name, dtype_name
from paceline.drafters.eagle import EagleDrafter
from paceline.drafters.eagle_vocabularies import output_layer_of, vocabulary_of
from paceline.errors import ConfigError
from paceline.heads.eagle import EagleHead
from paceline.heads.eagle_folder import LoadedEagle, save_eagle
from paceline.heads.folders import read_all_tensors
from paceline.training.allocator import keep_large_blocks
from paceline.training.capture import Conversation
from paceline.training.context import folder_digest, location_digests
from paceline.training.eagle_fit import EagleFit, EagleFitOptions
from paceline.training.eagle_readme import build_eagle_readme
from paceline.training.eagle_setup import (
    Context,
    EagleParts,
    covered,
    eagle_config,
    eagle_parts,
    initial_head,
    static_ids,
)
from paceline.training.eagle_states import CachedStates, OnlineStates, StateSource
from paceline.training.eagle_texts import read_texts
from paceline.training.engine_check import check_in_engine, evenly_spaced
from paceline.training.provenance import build_provenance
from paceline.training.run_folder import stage_key
from paceline.training.shards import check_disk, predicted_bytes, read_answers
from paceline.vocabularies.speculative import VocabularyRanking

Reported = Mapping[str, Mapping[str, Any]]
WEIGHTS = "weights.safetensors"
IDS = "ids.safetensors"
_HEAD_FILES = ("config.json", "model.safetensors")


def fit_dependencies(context: Context) -> dict[str, Any]:
    """What the weights depend on, beside the answers."""
    options = context.options
    found = options.chosen(
        "vocabulary", "held_out", "drop_loops", "epochs", "learning_rate", "batch_tokens", "max_len",
        "num_steps", "step_decay", "loss_fraction", "gradient_norm", "seed",
    )  # fmt: skip
    found |= options.chosen("ranking_width")
    if options.init is not None:
        found["init"] = folder_digest(options.init, _HEAD_FILES)
    else:
        found |= options.chosen(
            "feature_layers", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"
        )
    return {**found, **vocabulary_dependencies(context)} if options.vocabulary == "static" else found


def run_fit(context: Context, reported: Reported) -> dict[str, Any]:  # noqa: ARG001
    """Fit the head; its weights are in the stage's folder."""
    folder = context.stage_folder("eagle3-fit")
    keep_large_blocks()
    fit = build_fit(context, folder)
    num_parameters = sum(parameter.numel() for parameter in fit.modules.parameters())
    num_learned = sum(int(text.is_answer[2:].sum()) for text in fit.train)
    context.reporter.say(
        f"fit: {len(fit.train):,} texts, {num_learned:,} tokens to learn, {num_parameters:,} parameters, "
        f"{len(fit.held_out):,} held-out texts"
    )
    with context.reporter.bar("fit", fit.total_steps, "steps") as on_step:
        history = fit.run(on_step, context.reporter.say)
    fit.write_weights(folder / WEIGHTS)
    return {
        "num_texts": len(fit.train),
        "num_held_out_texts": len(fit.held_out),
        "num_learned_tokens": num_learned,
        "num_parameters": num_parameters,
        "folder": folder.name,
        "history": [asdict(figures) for figures in history],
        "chain_length": history[-1].acceptance_length,
    }


def build_fit(context: Context, folder: Path) -> EagleFit:
    """Texts, head and optimiser, ready to run."""
    options, target = context.options, context.generator.target
    layer = output_layer_of(target)
    parts = eagle_parts(context, layer)
    train, held_out = _texts(context, "training"), _texts(context, "held-out")
    device = target.device
    return EagleFit(
        parts.head.to(device),
        target,
        layer,
        train,
        held_out,
        EagleFitOptions(
            **options.chosen(
                "epochs", "learning_rate", "batch_tokens", "num_steps", "step_decay", "loss_fraction",
                "gradient_norm", "seed",
            )
        ),
        folder,
        ranking=None if parts.ranking is None else parts.ranking.to(device),
        own_rows=None if parts.rows is None else parts.rows.to(device),
        own_ids=None if parts.ids is None else parts.ids.to(device),
        states=_state_source(context, parts.head.config.feature_layers, (*train, *held_out)),
    )  # fmt: skip


def _texts(context: Context, side: str) -> list[Conversation]:
    """Texts of one side of the split."""
    belongs = context.is_training if side == "training" else context.is_held_out
    try:
        return read_texts(
            context.answers_folder,
            lambda answer: belongs(answer.root_key),
            context.options.max_len,
            drop_loops=context.options.drop_loops and side == "training",
        )
    except ConfigError:
        raise ConfigError(
            f"no {side} answers: give more prompts, a higher --num-tokens, or another --held-out fraction"
        ) from None


def _state_source(context: Context, layers: tuple[int, ...], texts: tuple[Conversation, ...]) -> StateSource:
    """Where the target's states come from."""
    options, target = context.options, context.generator.target
    online = OnlineStates(target, layers)
    if options.features == "online":
        return online
    names = {"target": target.fingerprint, "dtype": str(target.dtype), "layers": list(layers)}
    folder = context.folder.root / f"states-{stage_key('', names)[:8]}"
    num_bytes = predicted_bytes(sum(len(text.token_ids) for text in texts), target.hidden_size, len(layers))
    context.reporter.say(f"states of the target will take about {num_bytes / 1e9:.2f} GB of disk")
    limit = None if options.max_disk_gb is None else int(options.max_disk_gb * 1e9)
    check_disk(folder, num_bytes, limit, "states (--features cached)")
    return CachedStates(online, folder)


def vocabulary_dependencies(context: Context) -> dict[str, Any]:
    """What the ids of the static vocabulary depend on, beside the answers."""
    options = context.options
    return {
        **options.chosen("static_entries", "static_corpus", "held_out"),
        "digests": location_digests(options.static_corpus),
        "init": None if options.init is None else folder_digest(options.init, _HEAD_FILES),
    }


def run_vocabulary(context: Context, reported: Reported) -> dict[str, Any]:
    """Count tokens and choose the static vocabulary; rows that were trained keep their tokens."""
    trained = read_all_tensors(_weights_file(context, reported)).get("row_ids")
    chosen = static_ids(context) if trained is None else covered(context, trained)
    folder = context.stage_folder("eagle3-vocabulary")
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "ids.partial"
    save_file({"ids": chosen.entry_ids.contiguous()}, partial)
    partial.replace(folder / IDS)
    context.reporter.say(
        f"static vocabulary: {len(chosen.entry_ids):,} tokens cover {chosen.coverage:.2%} of the answers"
    )
    return {
        "num_entries": len(chosen.entry_ids),
        "coverage": chosen.coverage,
        "counted": [Path(name).name for name in context.options.static_corpus] or "answers",
        "folder": folder.name,
    }


def evaluation_dependencies(context: Context) -> dict[str, Any]:
    """What the check in the engine depends on, beside the weights."""
    return context.options.chosen("check_prompts", "num_speculative_tokens")


def run_evaluation(context: Context, reported: Reported) -> dict[str, Any]:
    """Answer held-out prompts through the engine, with every vocabulary that the head serves."""
    options, target = context.options, context.generator.target
    if not options.check_prompts:
        return {"num_prompts": 0}
    recorded = [a for a in read_answers(context.answers_folder) if context.is_held_out(a.root_key)]
    answers = evenly_spaced(recorded, options.check_prompts)
    loaded = _loaded_eagle(context, reported)
    layer = loaded.head.to(target.device, target.dtype).requires_grad_(False)
    found: dict[str, Any] = {"num_prompts": len(answers)}
    for name in _served(loaded):
        figures = check_in_engine(
            context.generator,
            EagleDrafter(target, layer, vocabulary_of(name, target, loaded)),
            answers,
            max_new_tokens=options.max_new_tokens,
            num_speculative_tokens=options.num_speculative_tokens,
        )
        context.reporter.say(
            f"engine, {name}: {figures['mean_acceptance_length']:.2f} tokens per round at "
            f"{options.num_speculative_tokens} nodes, {figures['identical_fraction']:.0%} of the answers "
            "identical"
        )
        found[name] = figures
    return found


def _served(loaded: LoadedEagle) -> tuple[str, ...]:
    """Vocabularies that a head can draft with."""
    if loaded.rows is not None:
        return ("static",)
    return ("full", "static") if loaded.ranking is None else ("full", "static", "speculative")


def export_dependencies(context: Context) -> dict[str, Any]:
    """What the exported folder depends on, beside the figures."""
    return {**context.options.chosen("export_dtype"), "out": str(context.options.out.absolute())}


def run_export(context: Context, reported: Reported) -> dict[str, Any]:
    """Write the head folder."""
    options, target = context.options, context.generator.target
    provenance = build_provenance(
        options,
        reported,
        target_fingerprint=target.fingerprint,
        target_dtype=dtype_name(target.dtype),
        data_digests=location_digests((*options.data, *options.static_corpus)),
    )
    provenance["coverage"] = reported["vocabulary"]["coverage"]
    loaded = _loaded_eagle(context, reported, provenance)
    save_eagle(
        options.out, loaded, build_eagle_readme(provenance), dtype=dtype_from_name(options.export_dtype)
    )
    context.reporter.say(f"head written to {options.out}")
    return {"out": options.out.name}


def _loaded_eagle(
    context: Context, reported: Reported, provenance: dict[str, Any] | None = None
) -> LoadedEagle:
    """The fitted head, as if loaded from its folder."""
    target = context.generator.target
    tensors = read_all_tensors(_weights_file(context, reported))
    vocabulary = reported["vocabulary"]
    ids = read_all_tensors(context.folder.root / vocabulary["folder"] / IDS)["ids"]
    init = initial_head(context.options, target)
    config = eagle_config(context.options, target) if init is None else init.head.config
    ranking = None
    if "ranking.vocabulary.weight" in tensors:
        num_entries, width = tensors["ranking.vocabulary.weight"].shape
        ranking = VocabularyRanking(target.hidden_size, num_entries, width)
    parts = EagleParts(EagleHead(config), ranking=ranking)
    for name, module in (("head", parts.head), ("ranking", parts.ranking)):
        if module is not None:
            module.load_state_dict(_part(tensors, name))
    if provenance is None:
        provenance = {"target_fingerprint": target.fingerprint, "coverage": vocabulary["coverage"]}
    return LoadedEagle(parts.head.eval(), parts.ranking, ids, tensors.get("rows.weight"), provenance)


def _weights_file(context: Context, reported: Reported) -> Path:
    """What the fit wrote."""
    return context.folder.root / str(reported["fit"]["folder"]) / WEIGHTS


def _part(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """Tensors of one part under its own names."""
    return {
        name.removeprefix(f"{part}."): tensor.to(torch.float32)
        for name, tensor in tensors.items()
        if name.startswith(f"{part}.")
    }
